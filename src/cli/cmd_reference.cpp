// assay reference: runs a checkpoint in the native runtime, prints what it generates, records a trace when asked, and
// plants faults.
#include <fmt/format.h>

#include <charconv>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "base/files.h"
#include "base/version.h"
#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "cli/positions.h"
#include "io/json.h"
#include "model/config.h"
#include "model/engine.h"
#include "model/faults.h"
#include "model/follow.h"
#include "model/gemm.h"
#include "model/tokenizer.h"
#include "probe/recorder.h"
#include "probe/settings.h"
#include "quant/weight_source.h"
#include "report/text_table.h"
#include "runtime/process_info.h"

namespace assay::cli {
namespace {

// As given; Choose turns them into the engine's options. Empty text: not given.
struct Arguments {
  std::string model, path = "materialised", dtype = "f32", kv_dtype = "auto", layers, like, trace, level, input;
  std::vector<std::string> prompts, tokens, overrides, include;
  EngineOptions engine;
  bool batch = false, json = false, list_faults = false, tokens_in_trace = false, echo = false;
};

// "1,2,3": a comma, spaces or both between two ids, spaces at the ends.
Result<std::vector<int64_t>> ParseIds(const std::string& text) {
  std::vector<int64_t> ids;
  const char *at = text.data(), *end = at + text.size();
  const auto skip_spaces = [&] {
    while (at < end && *at == ' ') ++at;
  };
  skip_spaces();
  while (at < end) {
    if (!ids.empty() && *at == ',') {
      ++at;
      skip_spaces();
    }
    int64_t id = 0;
    const auto [next, error] = std::from_chars(at, end, id);
    const bool ends_well = next == end || *next == ',' || *next == ' ';
    if (error != std::errc() || id < 0 || !ends_well || text.back() == ',') {
      return Status::Usage("--tokens, column " + std::to_string(at - text.data() + 1) +
                           ": token ids of 0 and above with a comma between two are expected, found \"" + text + "\"");
    }
    ids.push_back(id);
    at = next;
    skip_spaces();
  }
  if (ids.empty()) return Status::Usage("--tokens: no token id in \"" + text + "\"");
  return ids;
}

// "A:B", ":B", "A:", ":"; the engine checks the range.
Status ParseLayers(const std::string& text, EngineOptions* options) {
  if (text.empty()) return {};
  const size_t colon = text.find(':');
  const auto number = [&](std::string_view part, int64_t absent, int64_t* out) {
    *out = absent;
    if (part.empty()) return true;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), *out);
    return error == std::errc() && end == part.data() + part.size();
  };
  const std::string_view view(text);
  if (colon == std::string::npos || !number(view.substr(0, colon), 0, &options->first_layer) ||
      !number(view.substr(colon + 1), -1, &options->last_layer)) {
    return Status::Usage("--layers: A:B is expected (half-open, either may be left out), found \"" + text + "\"");
  }
  return {};
}

// absorbed: the path asked for, as some faults show earlier on it.
int PrintFaults(bool json, bool absorbed) {
  if (!json) {
    for (const FaultDef& f : AllFaults()) {
      const std::string needs = DescribeNeeds(f.needs);
      fmt::print("{:<30} {:<10} {:<28} {}{}\n", f.name, f.cls, FirstBadOn(f, absorbed), f.what,
                 needs.empty() ? "" : " [" + needs + "]");
    }
    return kExitOk;
  }
  Json out;
  out["schema"] = "assay.faults/1";
  out["version"] = ASSAY_VERSION;
  out["faults"] = Json::array();
  for (const FaultDef& f : AllFaults()) {
    Json entry;
    entry["name"] = std::string(f.name);
    entry["class"] = std::string(f.cls);
    entry["first_bad"] = std::string(FirstBadOn(f, absorbed));
    entry["needs"] = ListNeeds(f.needs);
    entry["what"] = std::string(f.what);
    out["faults"].push_back(std::move(entry));
  }
  fmt::print("{}\n", WriteJson(out));
  return kExitOk;
}

// The environment's settings; --trace, --level and --tokens-in-trace win.
Result<Settings> TraceSettings(const Arguments& a) {
  std::vector<std::string> given;
  if (!a.trace.empty()) {
    given.push_back("ASSAY=all");
    given.push_back("ASSAY_DIR=" + a.trace);
  }
  if (!a.level.empty()) given.push_back("ASSAY_LEVEL=" + a.level);
  if (a.tokens_in_trace) given.emplace_back("ASSAY_TOKENS=on");
  return ParseSettings(given, true);
}

// Prompts as text first, then as ids, each in the order given. A model without a readable tokenizer takes ids.
Result<std::vector<PromptInput>> Prompts(const Arguments& a, const Tokenizer* tokenizer, const Status& no_tokenizer) {
  std::vector<PromptInput> out;
  for (const std::string& text : a.prompts) {
    if (tokenizer == nullptr) return no_tokenizer;
    ASSAY_ASSIGN_OR_RETURN(std::vector<int64_t> ids, tokenizer->Encode(text));
    if (ids.empty()) return Status::Usage("--prompt: an empty prompt has no token to start from");
    out.push_back({std::move(ids), {}});
  }
  for (const std::string& text : a.tokens) {
    ASSAY_ASSIGN_OR_RETURN(std::vector<int64_t> ids, ParseIds(text));
    out.push_back({std::move(ids), {}});
  }
  if (!a.like.empty()) {
    ASSAY_ASSIGN_OR_RETURN(const std::unique_ptr<Trace> trace, Trace::Open(a.like));
    ASSAY_RETURN_IF_ERROR(FollowTrace(*trace, &out));
  }
  if (out.empty())
    return Status::Usage("give a prompt: --prompt TEXT, --tokens IDS, or --like TRACE with stored tokens");
  return out;
}

// assay.reference/1 of docs/json.md. Prompt and text are the user's own content, as on the plain output.
Json ToJson(const Engine& engine, const std::vector<PromptInput>& prompts, const std::vector<Generation>& made,
            const Tokenizer* tokenizer, const std::string& trace) {
  Json out;
  out["schema"] = "assay.reference/1";
  out["version"] = ASSAY_VERSION;
  for (const auto& [key, value] : engine.Describe(prompts)) out["run"][key] = value;
  out["requests"] = Json::array();
  for (size_t i = 0; i < made.size(); ++i) {
    Json request;
    // Prompts that a fault added have no input of the user's; their tokens are not repeated here.
    request["added_by_fault"] = i >= prompts.size();
    if (i < prompts.size()) request["prompt_tokens"] = prompts[i].tokens;
    request["tokens"] = made[i].tokens;
    if (tokenizer != nullptr) {
      if (i < prompts.size()) request["prompt"] = tokenizer->Decode(prompts[i].tokens, true);
      request["text"] = tokenizer->Decode(made[i].tokens, true);
    }
    request["stopped"] = made[i].stopped;
    out["requests"].push_back(std::move(request));
  }
  const RunStats& s = engine.stats();
  out["stats"]["prefill_tokens"] = s.prefill_tokens;
  out["stats"]["prefill_seconds"] = JsonNumber(s.prefill_seconds);
  out["stats"]["decode_tokens"] = s.decode_tokens;
  out["stats"]["decode_seconds"] = JsonNumber(s.decode_seconds);
  out["stats"]["nonfinite_choices"] = s.nonsense_choices;
  if (!trace.empty()) out["trace"] = trace;
  return out;
}

// Words were checked by the parser; what depends on two options is checked here.
Status Choose(const Arguments& a, EngineOptions* o) {
  o->path = a.path == "absorbed" ? AttentionPath::kAbsorbed : AttentionPath::kMaterialised;
  o->dtype = a.dtype == "f64" ? ComputeDType::kF64 : a.dtype == "bf16" ? ComputeDType::kBF16 : ComputeDType::kF32;
  o->kv_dtype = a.kv_dtype == "f32"    ? KvDType::kF32
                : a.kv_dtype == "bf16" ? KvDType::kBF16
                : a.kv_dtype == "fp8"  ? KvDType::kFp8E4M3
                                       : KvDType::kAuto;
  if (a.batch && o->sequential) return Status::Usage("--batch and --sequential exclude each other");
  o->layer_input_trace = a.input;
  ASSAY_RETURN_IF_ERROR(ParseLayers(a.layers, o));
  if (!a.input.empty() && o->first_layer == 0) {
    return Status::Usage(
        "--input has the output of the layer before --layers A:B with A above 0; without it, nothing "
        "would be read from " +
        a.input);
  }
  return {};
}

// A run that failed has no trace: what it wrote until then is taken away again, and the folder if nothing else is in
// it.
void RemoveTrace(const std::string& dir, const std::string& file, bool alone) {
  std::error_code ignored;  // it stays, then, and says itself that it is incomplete
  std::filesystem::remove(file, ignored);
  if (!alone) return;
  std::filesystem::remove(dir + "/manifest.json", ignored);
  for (const auto& entry : std::filesystem::directory_iterator(dir, ignored)) {  // of the recorder, which is still open
    if (entry.path().extension() == ".control") std::filesystem::remove(entry.path(), ignored);
  }
  std::filesystem::remove_all(dir + "/payloads", ignored);
  std::filesystem::remove(dir, ignored);
}

// Whether a trace folder holds recordings of other processes.
bool HoldsOtherRecordings(const std::string& dir, const std::string& own_file) {
  std::error_code ignored;
  for (std::filesystem::directory_iterator it(dir, ignored), end; !ignored && it != end; it.increment(ignored)) {
    if (it->path().extension() == ".assay" && it->path().filename() != std::filesystem::path(own_file).filename()) {
      return true;
    }
  }
  return false;
}

// config.json, or what the metadata of a GGUF file says.
Result<ModelConfig> ConfigOf(const WeightSource& source, const Arguments& a) {
  if (!source.is_gguf()) return LoadModelConfig(a.model, a.overrides);
  if (source.config().is_null()) {
    return Status::BadInput(source.path() + ": its general.architecture is not one that assay runs");
  }
  return ParseModelConfig(WriteJson(source.config(), -1), source.config_file(), a.overrides);
}

// The tokenizer of a GGUF model is a tokenizer.json beside the file; the one inside is not read.
Result<std::unique_ptr<Tokenizer>> TokenizerOf(const WeightSource& source, const std::string& model) {
  if (!source.is_gguf()) return Tokenizer::Load(model);
  const std::filesystem::path path(model);
  std::string folder = IsDirectory(model) ? model : path.has_parent_path() ? path.parent_path().string() : ".";
  if (!FileExists(folder + "/tokenizer.json")) {
    return Status::BadInput(source.config_file() +
                            ": no tokenizer.json beside it, and its own is not read; give --tokens");
  }
  return Tokenizer::Load(folder);
}

// Text chosen from NaN looks like any other.
void WarnOfNonsense(const RunStats& stats, bool traced) {
  if (stats.nonsense_choices == 0) return;
  fmt::print(stderr,
             "assay reference: warning: {} tokens were chosen from logits that hold NaN or infinities, first behind "
             "position {} of prompt {}; the text means nothing from there on. {}\n",
             stats.nonsense_choices, stats.nonsense_position, stats.nonsense_prompt + 1,
             traced ? "`assay check` names the tensor where they begin"
                    : "Record the run (--trace DIR), and `assay check DIR` names the tensor where they begin");
}

// The trace is closed before the text is printed: who sees the text can read the trace.
Status Reference(const Arguments& a) {
  EngineOptions options = a.engine;
  ASSAY_RETURN_IF_ERROR(Choose(a, &options));
  ASSAY_ASSIGN_OR_RETURN(const Settings settings, TraceSettings(a));
  for (const auto& [name, given] : {std::pair{"--level", !a.level.empty()}, {"--tokens-in-trace", a.tokens_in_trace}}) {
    if (given && !settings.on()) {
      return Status::Usage(fmt::format("{} has no effect: nothing is recorded; give a folder with --trace", name));
    }
  }
  ASSAY_ASSIGN_OR_RETURN(std::shared_ptr<const WeightSource> source, WeightSource::Open(a.model));
  ASSAY_ASSIGN_OR_RETURN(const ModelConfig config, ConfigOf(*source, a));
  std::unique_ptr<Tokenizer> tokenizer;
  // A checkpoint without a tokenizer still runs by ids; the error is kept for the prompt that would have needed it.
  auto loaded = TokenizerOf(*source, a.model);
  if (loaded.ok()) tokenizer = std::move(loaded).value();
  ASSAY_ASSIGN_OR_RETURN(const std::vector<PromptInput> prompts, Prompts(a, tokenizer.get(), loaded.status()));
  ASSAY_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine, Engine::Create(std::move(source), config, options));
  if (options.kv_scale > 0 && engine->options().kv_dtype != KvDType::kFp8E4M3) {
    return Status::Usage("--kv-scale has no effect: only an fp8 cache has a scale (--kv-dtype fp8)");
  }
  for (const PromptInput& prompt : prompts) {
    ASSAY_RETURN_IF_ERROR(
        CheckPositions(engine->config(), prompt.tokens.size(), engine->options().max_tokens,
                       "ask for fewer, or raise it with --config-override max_position_embeddings=N"));
  }
  for (const std::string& note : engine->config().notes)
    fmt::print(stderr, "assay reference: note: {}\n", Printable(note, false));

  std::unique_ptr<Recorder> recorder;
  bool shared = false;  // the trace folder, with other recordings
  if (settings.on()) {
    ProcessInfo process = DescribeThisProcess();
    process.rank = 0;
    process.world_size = engine->options().shards;
    for (const auto& entry : engine->Describe(prompts)) process.meta.push_back(entry);
    for (const std::string& text : a.overrides) process.meta.emplace_back("override", text);
    ASSAY_ASSIGN_OR_RETURN(recorder, Recorder::Open(settings, process));
    shared = HoldsOtherRecordings(recorder->dir(), recorder->path());
    if (shared) {
      fmt::print(
          stderr,
          "assay reference: note: {} holds another recording already; show and diff take both for one run. For a "
          "run of its own name another folder\n",
          recorder->dir());
    }
  }
  auto made = engine->Generate(prompts, recorder.get());
  // What is not in the trace is said behind the text, which the user has waited for.
  Status incomplete;
  if (recorder) {
    const Status closed = recorder->Close();
    if (!made.ok()) {
      RemoveTrace(recorder->dir(), recorder->path(), !shared);
      return made.status();
    }
    incomplete = closed;
    fmt::print(stderr, "assay reference: {} events in {}\n", recorder->recorded(), recorder->dir());
    const DropCounts drops = recorder->drops();
    if (const uint64_t lost = drops.total(); lost > 0) {
      fmt::print(stderr, "assay reference: {} observations were dropped; the trace says why (assay show)\n", lost);
    }
    if (drops.disk_full > 0) {
      incomplete = Status::Environment(fmt::format("{}: no space for {} events; the text is complete, the trace is not",
                                                   recorder->dir(), drops.disk_full));
    }
  }
  if (!made.ok()) return made.status();
  WarnOfNonsense(engine->stats(), recorder != nullptr);
  const std::string dir = recorder ? recorder->dir() : "";
  if (a.json) {
    fmt::print("{}\n", WriteJson(ToJson(*engine, prompts, *made, tokenizer.get(), dir)));
    return incomplete;
  }
  for (size_t i = 0; i < made->size(); ++i) {
    if (i >= prompts.size()) {
      fmt::print(stderr, "assay reference: the fault's own second prompt is not printed\n");
      break;
    }
    if (prompts.size() > 1) fmt::print("[{}] ", i + 1);
    if (tokenizer) {
      std::vector<int64_t> ids;
      if (a.echo) ids = prompts[i].tokens;
      ids.insert(ids.end(), (*made)[i].tokens.begin(), (*made)[i].tokens.end());
      fmt::print("{}\n", tokenizer->Decode(ids, true));
    } else {
      std::string text;
      for (int64_t id : (*made)[i].tokens) text += (text.empty() ? "" : ",") + std::to_string(id);
      fmt::print("{}\n", text);
    }
  }
  const RunStats& s = engine->stats();
  fmt::print(stderr, "assay reference: prefill {} tokens in {:.3f} s, decode {} tokens in {:.3f} s", s.prefill_tokens,
             s.prefill_seconds, s.decode_tokens, s.decode_seconds);
  if (s.decode_tokens > 0)
    fmt::print(stderr, " ({:.2f} ms a token)", 1e3 * s.decode_seconds / static_cast<double>(s.decode_tokens));
  fmt::print(stderr, "\n");
  return incomplete;
}

}  // namespace

void AddReferenceCommand(CLI::App& app, int* exit_code) {
  auto* command = app.add_subcommand("reference", "Run a checkpoint in the native reference runtime, and trace it");
  auto a = std::make_shared<Arguments>();
  EngineOptions& e = a->engine;
  command->add_option(
      "model", a->model,
      "Checkpoint folder: config.json, *.safetensors (plain or quantised), tokenizer.json; or a GGUF file");
  command->add_option("--prompt", a->prompts, "A prompt; repeat for several requests")->allow_extra_args(false);
  command->add_option("--tokens", a->tokens, "A prompt as token ids, \"5,17,204\"; repeatable")
      ->allow_extra_args(false);
  command->add_option("--max-tokens", e.max_tokens, "Tokens to generate a request")->capture_default_str();
  command->add_option("--path", a->path, "Attention of MLA models")
      ->check(CLI::IsMember({"materialised", "absorbed"}))
      ->capture_default_str();
  command->add_option("--dtype", a->dtype, "Arithmetic: f32, f64, or bf16 rounding after every operation")
      ->check(CLI::IsMember({"f32", "f64", "bf16"}))
      ->capture_default_str();
  command->add_option("--kv-dtype", a->kv_dtype, "Cache storage; auto is the arithmetic's own")
      ->check(CLI::IsMember({"auto", "f32", "bf16", "fp8"}))
      ->capture_default_str();
  command->add_option("--kv-scale", e.kv_scale, "fp8: value = code * scale; 0: a layer's largest first value / 448")
      ->capture_default_str();
  command->add_option("--shards", e.shards, "Tensor-parallel ranks")->capture_default_str();
  command->add_option("--chunk", e.chunk, "Prefill in chunks of N tokens merged by log-sum-exp; 0: in one piece")
      ->capture_default_str();
  command->add_option("--block-size", e.block_size, "Tokens a block of the paged cache")->capture_default_str();
  command->add_option("--max-batch-tokens", e.max_batch_tokens, "Tokens a step")->capture_default_str();
  command->add_flag("--batch", a->batch, "Run the requests together (the default)");
  command->add_flag("--sequential", e.sequential, "Run the requests one after the other");
  command->add_flag("--prefix-cache", e.prefix_cache, "Share cache blocks of equal beginnings");
  command->add_option("--threads", e.threads, "Threads of a matrix product")->capture_default_str();
  command->add_option("--temperature", e.temperature, "0: greedy")->capture_default_str();
  CLI::Option* seed = command->add_option("--seed", e.seed, "Of the sampler, with a temperature");
  seed->capture_default_str();
  command->add_flag("--ignore-eos", e.ignore_eos, "Go on behind an end token");
  command->add_option("--layers", a->layers, "Run layers A:B only (half-open); A > 0 needs --input");
  command->add_option("--input", a->input, "Trace with the payload of layers.(A-1).out, for --layers A:B");
  command->add_flag("--stream", e.stream, "Drop each layer's weights after use (models larger than memory)");
  command->add_flag("--all-logits", e.all_logits, "Compute and record logits of every row");
  command->add_option("--like", a->like, "Follow the tokens of another run's trace instead of choosing");
  command->add_option("--trace", a->trace, "Record into this folder (level stats unless said otherwise)");
  command->add_option("--level", a->level, "names, shapes, stats, sample or payload (content!)");
  command->add_flag("--tokens-in-trace", a->tokens_in_trace, "Store token ids in the trace (content!), for --like");
  command->add_option("--config-override", a->overrides, "KEY=VALUE of config.json, JSON syntax; repeatable")
      ->allow_extra_args(false);
  command->add_option("--fault", e.fault, "Plant a fault: NAME, NAME@LAYER, NAME@all; none:NAME is its clean twin");
  command->add_flag("--list-faults", a->list_faults, "Print the faults that can be planted, and stop");
  CLI::Option* echo = command->add_flag("--echo", a->echo, "Print the prompt before the generated text");
  CLI::Option* json = command->add_flag("--json", a->json, "Print JSON (schemas assay.reference/1, assay.faults/1)");
  echo->excludes(json);  // which has the prompt
  command->footer(
      "Examples:\n"
      "  assay reference models/kjv-mla-10m --prompt \"In the beginning\" --max-tokens 40\n"
      "  assay reference models/kjv-mla-10m --prompt \"And God said\" --path absorbed --trace /tmp/a\n"
      "  assay reference models/kjv-mla-10m --prompt \"And God said\" --fault lse-base-2@1 --trace /tmp/b\n"
      "  assay reference models/kjv-mla-10m --prompt \"And God said\" --fault none:lse-base-2 --trace /tmp/a\n"
      "  assay reference DIR --tokens 1,52,8 --layers 0:2 --stream --trace /tmp/c --level payload\n"
      "Units: tokens, blocks and layers are counts; scales are plain factors. A fault that changes nothing exits 2.");
  command->callback([a, exit_code, command, seed] {
    if (a->list_faults) {
      if (const std::string other = WithoutEffect(*command, "--list-faults", {"--json", "--path", "model"});
          !other.empty()) {
        *exit_code = Fail("reference", Status::Usage(other));
        return;
      }
      *exit_code = PrintFaults(a->json, a->path == "absorbed");
      return;
    }
    if (a->model.empty()) {
      *exit_code = Fail("reference", Status::Usage("MODEL is missing: the folder of a checkpoint"));
      return;
    }
    if (seed->count() != 0 && a->engine.temperature == 0) {
      *exit_code = Fail("reference", Status::Usage("--seed has no effect: without --temperature nothing is drawn"));
      return;
    }
    const Status status = Reference(*a);
    if (!status.ok()) *exit_code = Fail("reference", status);
  });
}

}  // namespace assay::cli
