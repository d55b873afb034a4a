#include "model/engine.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>

#include "model/faults.h"
#include "model/gemm.h"
#include "model/layer_input.h"
#include "model/runner.h"
#include "model/sampler.h"
#include "trace/request_key.h"

namespace assay {
namespace {

// Of wall time that have passed; steady, as the time of day may be set.
double Seconds(std::chrono::steady_clock::time_point from) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - from).count();
}

std::string_view NameOf(ComputeDType dtype) {
  return dtype == ComputeDType::kF64 ? "f64" : dtype == ComputeDType::kBF16 ? "bf16" : "f32";
}

// kAuto is the compute dtype: the cache then rounds nothing.
std::string_view NameOf(KvDType kv, ComputeDType dtype) {
  switch (kv) {
    case KvDType::kF32:
      return "f32";
    case KvDType::kBF16:
      return "bf16";
    case KvDType::kFp8E4M3:
      return "fp8_e4m3";
    case KvDType::kAuto:
      break;
  }
  return NameOf(dtype);
}

// Asked twice, before and after a fault has changed options and config.
Status CheckOptions(const EngineOptions& o, const ModelConfig& c) {
  const auto bad = [](const std::string& text) { return Status::Usage(text); };
  if (o.shards < 1) return bad("shards must be at least 1");
  if (c.n_heads % o.shards != 0) {
    return bad(std::to_string(c.n_heads) + " heads cannot be split over " + std::to_string(o.shards) +
               " shards evenly");
  }
  if (!c.mla() && c.n_kv_heads % o.shards != 0 && o.shards % c.n_kv_heads != 0) {
    return bad(std::to_string(c.n_kv_heads) + " kv heads do not fit " + std::to_string(o.shards) + " shards");
  }
  if (o.chunk < 0 || o.block_size < 1 || o.max_batch_tokens < 1 || o.threads < 1 || o.max_tokens < 0) {
    return bad("chunk and max_tokens must not be negative; block size, batch tokens and threads at least 1");
  }
  if (o.path == AttentionPath::kAbsorbed && !c.mla())
    return bad("path absorbed needs a model with latent attention (MLA)");
  const int64_t last = o.last_layer < 0 ? c.n_layers : o.last_layer;
  if (o.first_layer < 0 || o.first_layer >= last || last > c.n_layers) {
    return bad("layers " + std::to_string(o.first_layer) + ":" + std::to_string(last) +
               " are not among 0:" + std::to_string(c.n_layers));
  }
  if (o.first_layer > 0 && o.layer_input_trace.empty()) {
    return bad("layers from " + std::to_string(o.first_layer) + " on need the trace that holds layers." +
               std::to_string(o.first_layer - 1) + ".out as payload (--input)");
  }
  if (!(o.temperature >= 0) || std::isinf(o.temperature)) return bad("temperature must be finite and not negative");
  if (!(o.kv_scale >= 0) || std::isinf(o.kv_scale)) return bad("the kv scale must be a finite number, not negative");
  if (o.block_size > 65536) return bad("a block holds at most 65536 tokens");
  return {};
}

}  // namespace

// Everything behind the engine's public face. Not safe to use from two threads: a run keeps its state in the runner.
struct Engine::Impl {
  std::shared_ptr<const WeightStore> store;
  // With what a planted fault changed; the store keeps the one that the checkpoint was opened with.
  ModelConfig config;
  EngineOptions options;
  FaultPlan fault;
  RunStats stats;
  // Last part of the checkpoint's path, for people.
  std::string model_name;
  // The runner of plain runs, kept with its weights from call to call.
  std::unique_ptr<Runner<float>> plain_f32;
  std::unique_ptr<Runner<double>> plain_f64;

  template <class T>
  // The kept runner of the precision at hand.
  std::unique_ptr<Runner<T>>& plain() {
    if constexpr (sizeof(T) == 8) {
      return plain_f64;
    } else {
      return plain_f32;
    }
  }

  DType compute_dtype() const {
    return options.dtype == ComputeDType::kF64    ? DType::kF64
           : options.dtype == ComputeDType::kBF16 ? DType::kBF16
                                                  : DType::kF32;
  }
  std::string_view path_name() const {
    if (!config.mla()) return "";
    return options.path == AttentionPath::kAbsorbed ? "absorbed" : "materialised";
  }

  // One set of prompts from options to generations; a planted fault runs its clean twin first.
  template <class T>
  Result<std::vector<Generation>> Generate(std::vector<PromptInput> prompts, Recorder* recorder,
                                           const LogitsSink& sink);
  // Steps until every request is done. Requests go to recorder, which may be null, and tensors through tap.
  template <class T>
  Result<std::vector<Generation>> Run(Runner<T>* runner, const EngineOptions& run_options,
                                      const std::vector<PromptInput>& prompts, Tap* tap, Recorder* recorder,
                                      const LogitsSink& sink);
};

template <class T>
Result<std::vector<Generation>> Engine::Impl::Generate(std::vector<PromptInput> prompts, Recorder* recorder,
                                                       const LogitsSink& sink) {
  EngineOptions run_options = options;
  PrepareInputs(fault, &run_options, &prompts);
  // Ids index the embedding without further checks from here on.
  for (const PromptInput& p : prompts) {
    if (p.tokens.empty()) return Status::Usage("a prompt has no tokens");
    for (const std::vector<int64_t>* ids : {&p.tokens, &p.forced}) {
      for (int64_t id : *ids) {
        if (id < 0 || id >= config.vocab_size) {
          return Status::Usage("token " + std::to_string(id) + " is outside the vocabulary of " +
                               std::to_string(config.vocab_size));
        }
      }
    }
  }
  // A fault that changes nothing would pass for one that nobody found: the twin's bits at the site are what the
  // faulty run's must differ from. It costs a second run, and only where a fault is planted.
  const std::string site = fault.first_bad_site();
  uint64_t clean_witness = 0;
  if (fault.id != FaultId::kNone) {
    FaultPlan twin = fault;
    twin.id = FaultId::kNone;
    Runner<T> clean(store, config, run_options, twin);
    Tap tap(nullptr, compute_dtype(), path_name());
    tap.WatchSite(site);
    const auto generated = Run<T>(&clean, run_options, prompts, &tap, nullptr, nullptr);
    if (!generated.ok()) return generated.status();
    clean_witness = tap.witness();
  }

  Tap tap(recorder, compute_dtype(), path_name());
  if (fault.id != FaultId::kNone) tap.WatchSite(site);
  // A planted fault changes weights as they are loaded, so its runner is not kept for the next call.
  std::unique_ptr<Runner<T>> own;
  if (fault.def != nullptr) {
    own = std::make_unique<Runner<T>>(store, config, run_options, fault);
  } else if (!plain<T>()) {
    plain<T>() = std::make_unique<Runner<T>>(store, config, run_options, fault);
  }
  Runner<T>* runner = own ? own.get() : plain<T>().get();
  auto generated = Run<T>(runner, run_options, prompts, &tap, recorder, sink);
  if (generated.ok() && fault.id != FaultId::kNone && tap.witness() == clean_witness) {
    return Status::Usage("fault " + std::string(fault.def->name) + " changed nothing in this run: " + site +
                         " is the same bit for bit without it (" + std::to_string(tap.witness_events()) +
                         " events). Give it longer prompts, more tokens or another layer");
  }
  return generated;
}

template <class T>
Result<std::vector<Generation>> Engine::Impl::Run(Runner<T>* runner, const EngineOptions& run_options,
                                                  const std::vector<PromptInput>& prompts, Tap* tap, Recorder* recorder,
                                                  const LogitsSink& sink) {
  SchedulerOptions so;
  so.block_size = run_options.block_size;
  so.chunk = run_options.chunk;
  so.max_batch_tokens = run_options.max_batch_tokens;
  so.prefix_cache = run_options.prefix_cache;
  so.sequential = run_options.sequential;
  // A scheduler of its own for each run: blocks are numbered from 0 again, so equal runs have equal tables.
  Scheduler scheduler(so);
  runner->Reset(tap);
  stats = RunStats();

  std::map<std::vector<int64_t>, int64_t> equal;  // prompts seen, for the ordinal
  std::vector<uint64_t> keys;
  for (const PromptInput& p : prompts) {
    const int64_t ordinal = equal[p.tokens]++;
    keys.push_back(RequestKey(p.tokens, ordinal));
    scheduler.Add(p.tokens);
    if (recorder != nullptr) {
      RequestInfo info;
      info.key = keys.back();
      info.prompt_tokens = static_cast<int64_t>(p.tokens.size());
      info.ordinal = ordinal;
      info.tokens = p.tokens;
      const Status added = recorder->AddRequest(info);
      if (!added.ok() && added.code() != Code::kEnvironment) return added;  // a full disk does not stop the run
    }
  }
  LayerInput<T> input;
  if (run_options.first_layer > 0) {
    ASSAY_RETURN_IF_ERROR(input.Open(run_options.layer_input_trace, run_options.first_layer - 1, config.hidden_size));
  }
  // A run that ends before the last layer chooses no tokens: its requests end with their prompts, unless tokens are
  // forced.
  const bool whole = run_options.last_layer < 0 || run_options.last_layer == config.n_layers;  // ends in logits

  std::vector<Generation> generations(prompts.size());
  std::vector<int64_t> logit_rows;
  std::vector<RowRun> logit_runs, choice_runs;
  std::vector<int64_t> choices;
  std::vector<float> margins;
  // The sink takes double whatever the run computes in.
  std::vector<double> wide;
  std::vector<T> given;
  StepRows step;
  // Buffers of the step are cleared, not freed.
  for (step.step = 0;; ++step.step) {
    const auto started = std::chrono::steady_clock::now();
    StepPlan plan = scheduler.Next();
    if (plan.rows == 0) break;
    step.rows = plan.rows;
    step.sequences = std::move(plan.sequences);
    step.tables.clear();
    step.keys.clear();
    step.ids.clear();
    step.positions.clear();
    step.runs.clear();
    logit_rows.clear();
    logit_runs.clear();
    bool prefill = false, decode = false;
    for (const StepSequence& s : step.sequences) {
      const std::vector<int64_t>& tokens = scheduler.tokens(s.request);
      step.tables.push_back(&scheduler.table(s.request));
      step.keys.push_back(keys[static_cast<size_t>(s.request)]);
      step.runs.push_back({step.keys.back(), s.first_row, s.n_rows, s.first_position, false});
      for (int64_t i = 0; i < s.n_rows; ++i) {
        step.ids.push_back(tokens[static_cast<size_t>(s.first_position + i)]);
        step.positions.push_back(s.first_position + i);
      }
      (s.decode ? decode : prefill) = true;
      // With all_logits every row; else the last row of each request that samples.
      const int64_t n = run_options.all_logits ? s.n_rows : s.samples ? 1 : 0;
      if (n > 0) {
        logit_runs.push_back(
            {step.keys.back(), static_cast<int64_t>(logit_rows.size()), n, s.first_position + s.n_rows - n, false});
        for (int64_t i = s.n_rows - n; i < s.n_rows; ++i) logit_rows.push_back(s.first_row + i);
      }
    }
    tap->BeginStep(step.step,
                   prefill && decode ? Phase::kMixed
                   : prefill         ? Phase::kPrefill
                                     : Phase::kDecode,
                   step.runs);

    // A run that begins at a later layer takes its input from a trace in place of the embedding.
    const T* rows_given = nullptr;
    if (run_options.first_layer > 0) {
      ASSAY_RETURN_IF_ERROR(input.Rows(step.runs, Fit(&given, step.rows * config.hidden_size)));
      rows_given = given.data();
    }
    ASSAY_RETURN_IF_ERROR(runner->Embed(step, rows_given));
    ASSAY_RETURN_IF_ERROR(runner->Layers(step, scheduler.blocks()));
    const T* logits = nullptr;
    if (whole && !logit_rows.empty()) {
      ASSAY_ASSIGN_OR_RETURN(logits, runner->Logits(step, logit_rows, logit_runs));
    }

    // Choices, in the order of the sequences.
    choices.clear();
    margins.clear();
    choice_runs.clear();
    int64_t at = 0;
    for (const StepSequence& s : step.sequences) {
      const auto r = static_cast<size_t>(s.request);
      // As many rows as were asked for above; at walks through logits in the same order.
      const int64_t n = run_options.all_logits ? s.n_rows : s.samples ? 1 : 0;
      for (int64_t i = 0; logits != nullptr && sink && i < n; ++i) {
        const T* row = logits + (at + i) * config.vocab_size;
        wide.assign(row, row + config.vocab_size);
        sink(s.request, s.first_position + s.n_rows - n + i, wide);
      }
      at += n;
      if (!s.samples) continue;
      Generation& g = generations[r];
      const std::vector<int64_t>& forced = prompts[r].forced;
      const auto made = g.tokens.size();
      const int64_t position = s.first_position + s.n_rows - 1;
      int64_t token = -1;
      if (logits != nullptr) {
        // The row before at: the last one of this request.
        const Choice choice = ChooseToken(logits + (at - 1) * config.vocab_size, config.vocab_size,
                                          run_options.temperature, run_options.seed, keys[r], position);
        if (choice.nonsense > 0 && stats.nonsense_choices++ == 0) {
          stats.nonsense_prompt = s.request;
          stats.nonsense_position = position;
        }
        choice_runs.push_back({keys[r], static_cast<int64_t>(choices.size()), 1, position, false});
        choices.push_back(choice.token);
        margins.push_back(static_cast<float>(choice.margin));
        token = choice.token;
      }
      // Forced tokens replace the choice, which is recorded all the same: it shows where the run would have gone.
      if (!forced.empty()) token = made < forced.size() ? forced[made] : -1;
      if (token < 0 || static_cast<int64_t>(made) >= run_options.max_tokens) {
        scheduler.Finish(s.request);
        runner->Forget(s.request);
        continue;
      }
      g.tokens.push_back(token);
      const bool end =
          std::find(config.eos_token_ids.begin(), config.eos_token_ids.end(), token) != config.eos_token_ids.end();
      g.stopped = end && !run_options.ignore_eos && forced.empty();
      if (g.stopped || static_cast<int64_t>(g.tokens.size()) >= run_options.max_tokens) {
        scheduler.Finish(s.request);
        runner->Forget(s.request);
      } else {
        scheduler.Append(s.request, token);
      }
    }
    if (tap->on() && !choices.empty()) {
      const auto n = static_cast<int64_t>(choices.size());
      tap->Record("next_token.margin", "T", DenseView(margins.data(), {n}), {.runs = choice_runs});
      tap->Record("next_token", "T", DenseView(choices.data(), {n}), {.runs = choice_runs});
    }
    ASSAY_RETURN_IF_ERROR(tap->status());
    // A step with any prompt row counts as prefill, with all its rows.
    (prefill ? stats.prefill_seconds : stats.decode_seconds) += Seconds(started);
    (prefill ? stats.prefill_tokens : stats.decode_tokens) += step.rows;
  }
  return generations;
}

Engine::Engine() : impl_(std::make_unique<Impl>()) {}
Engine::~Engine() = default;

Result<std::unique_ptr<Engine>> Engine::Create(std::shared_ptr<const Checkpoint> checkpoint, const ModelConfig& config,
                                               const EngineOptions& options) {
  return Create(WeightSource::FromCheckpoint(std::move(checkpoint), nullptr), config, options);
}

Result<std::unique_ptr<Engine>> Engine::Create(std::shared_ptr<const WeightSource> source, const ModelConfig& config,
                                               const EngineOptions& options) {
  std::unique_ptr<Engine> engine(new Engine());
  Impl& impl = *engine->impl_;
  const std::string path = source->path();
  const size_t end = path.find_last_not_of('/');
  const size_t slash = path.find_last_of('/', end);
  // The last part of the path without trailing slashes: what a reader calls the model; machine paths stay out of
  // traces.
  impl.model_name =
      path.substr(slash == std::string::npos ? 0 : slash + 1, end - (slash == std::string::npos ? 0 : slash + 1) + 1);
  // The store is opened with the checkpoint's own config: a fault may need another one.
  ASSAY_ASSIGN_OR_RETURN(impl.store, WeightStore::Open(std::move(source), config));
  impl.config = config;
  for (const std::string& note : impl.store->notes()) impl.config.notes.push_back(note);
  impl.options = options;
  ASSAY_RETURN_IF_ERROR(CheckOptions(impl.options, impl.config));
  ASSAY_ASSIGN_OR_RETURN(impl.fault, PlanFault(&impl.options, &impl.config));
  ASSAY_RETURN_IF_ERROR(CheckOptions(impl.options, impl.config));
  ASSAY_RETURN_IF_ERROR(SetGemmThreads(options.threads));
  // Once a process: a reference on a machine whose BLAS is wrong would accuse everybody else.
  static const Status gemm = CheckGemm();
  ASSAY_RETURN_IF_ERROR(gemm);
  return engine;
}

Result<std::vector<Generation>> Engine::Generate(const std::vector<PromptInput>& prompts, Recorder* recorder,
                                                 const LogitsSink& sink) {
  if (prompts.empty()) return Status::Usage("no prompt");
  if (impl_->options.dtype == ComputeDType::kF64) return impl_->Generate<double>(prompts, recorder, sink);
  return impl_->Generate<float>(prompts, recorder, sink);
}

const RunStats& Engine::stats() const { return impl_->stats; }
const EngineOptions& Engine::options() const { return impl_->options; }
const ModelConfig& Engine::config() const { return impl_->config; }

std::vector<std::pair<std::string, std::string>> Engine::Describe(const std::vector<PromptInput>& prompts) const {
  // What the run will really use: a planted fault may fit the chunk to the prompts.
  EngineOptions o = impl_->options;
  std::vector<PromptInput> prepared = prompts;
  PrepareInputs(impl_->fault, &o, &prepared);
  const ModelConfig& c = impl_->config;
  std::vector<std::pair<std::string, std::string>> out;
  const auto add = [&](std::string key, std::string value) { out.emplace_back(std::move(key), std::move(value)); };
  const auto integer = [&](std::string key, int64_t v) { add(std::move(key), std::to_string(v)); };
  const auto number = [&](std::string key, double v) {
    char text[32];
    std::snprintf(text, sizeof text, "%.17g", v);
    add(std::move(key), text);
  };
  add("engine", "assay-reference");
  add("path", c.mla() ? std::string(impl_->path_name()) : "attention");
  add("dtype", std::string(NameOf(o.dtype)));
  add("kv_dtype", std::string(NameOf(o.kv_dtype, o.dtype)));
  // Expanded keys of this step do not go through the cache, all others do.
  add("kv_source", c.mla() && o.path != AttentionPath::kAbsorbed ? "fresh" : "cache");
  add("model", impl_->model_name);
  add("gemm", GemmDescription());
  integer("shards", o.shards);
  integer("chunk", o.chunk);
  integer("block_size", o.block_size);
  integer("max_batch_tokens", o.max_batch_tokens);
  integer("threads", o.threads);
  integer("stream", o.stream ? 1 : 0);
  integer("prefix_cache", o.prefix_cache ? 1 : 0);
  integer("sequential", o.sequential ? 1 : 0);
  number("temperature", o.temperature);
  integer("seed", static_cast<int64_t>(o.seed));
  if (!o.fault.empty()) add("fault", o.fault);
  add("model.model_type", c.model_type);
  integer("model.hidden_size", c.hidden_size);
  integer("model.n_layers", c.n_layers);
  integer("model.n_heads", c.n_heads);
  integer("model.n_kv_heads", c.n_kv_heads);
  integer("model.head_dim", c.head_dim);
  integer("model.vocab_size", c.vocab_size);
  integer("model.intermediate_size", c.intermediate_size);
  integer("model.q_lora_rank", c.q_lora_rank);
  integer("model.kv_lora_rank", c.kv_lora_rank);
  integer("model.qk_nope_head_dim", c.qk_nope_head_dim);
  integer("model.qk_rope_head_dim", c.qk_rope_head_dim);
  integer("model.v_head_dim", c.v_head_dim);
  number("model.rms_norm_eps", c.rms_norm_eps);
  number("model.softmax_scale", SoftmaxScale(c));
  number("model.rope_theta", c.rope.theta);
  number("model.rope_factor", c.rope.factor);
  constexpr const char* kRopeTypes[] = {"default", "linear", "yarn", "llama3"};
  if (const auto kind = static_cast<size_t>(c.rope.kind); kind < std::size(kRopeTypes))
    out.emplace_back("model.rope_type", kRopeTypes[kind]);
  integer("model.rope_dim", MakeRopeTable(c).rotary_dim);
  for (const auto& [key, value] : {std::pair{"model.rope_original_max_position", c.rope.original_max_position},
                                   {"model.rope_beta_fast", c.rope.beta_fast},
                                   {"model.rope_beta_slow", c.rope.beta_slow},
                                   {"model.rope_mscale", c.rope.mscale},
                                   {"model.rope_mscale_all_dim", c.rope.mscale_all_dim},
                                   {"model.rope_attention_factor", c.rope.attention_factor},
                                   {"model.rope_low_freq_factor", c.rope.low_freq_factor},
                                   {"model.rope_high_freq_factor", c.rope.high_freq_factor},
                                   {"model.latent_norm_eps", c.latent_norm_eps}}) {
    if (value != 0) number(key, value);  // 0: absent
  }
  integer("model.rope_truncate", c.rope.truncate ? 1 : 0);
  integer("model.rope_interleaved", c.rope.interleaved ? 1 : 0);
  integer("model.sliding_window", c.sliding_window);
  integer("model.n_routed_experts", c.n_routed_experts);
  integer("model.n_experts_per_tok", c.n_experts_per_tok);
  integer("model.n_shared_experts", c.n_shared_experts);
  integer("model.moe_intermediate_size", c.moe_intermediate_size);
  number("model.routed_scaling_factor", c.routed_scaling_factor);
  integer("model.norm_topk_prob", c.norm_topk_prob ? 1 : 0);
  integer("model.n_group", c.n_group);
  integer("model.topk_group", c.topk_group);
  add("model.group_score", c.group_top2_sum ? "top2_sum" : "max");
  integer("model.sandwich_norm", c.sandwich_norm ? 1 : 0);
  integer("model.scoring_sigmoid", c.scoring_sigmoid ? 1 : 0);
  return out;
}

}  // namespace assay
