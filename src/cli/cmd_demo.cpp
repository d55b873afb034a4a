// `assay demo`: the story of the README on the shipped model. Two runs, one healthy on the materialised path and one
// with a planted fault on the absorbed, paged path; what a user sees of them, what a hand-written patch would print,
// and what the comparison of the two traces says. Everything printed is computed in this process, in seconds.
#include <fmt/format.h>
#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/version.h"
#include "cli/commands.h"
#include "cli/demo_figures.h"
#include "cli/exit_codes.h"
#include "cli/positions.h"
#include "cli/side_by_side.h"
#include "compare/diff.h"
#include "io/json.h"
#include "io/safetensors.h"
#include "model/config.h"
#include "model/engine.h"
#include "model/faults.h"
#include "model/tokenizer.h"
#include "probe/recorder.h"
#include "report/diff_report.h"
#include "runtime/process_info.h"
#include "trace/reader.h"

namespace assay::cli {
namespace {

namespace fs = std::filesystem;

// Defaults are the story of the README.
struct DemoOptions {
  std::string model;  // empty: looked for
  std::string prompt = "And God said unto Moses";
  std::string fault = "decode-output-unwritten";
  int layer = -1;  // -1: the lowest one where the fault can be
  int64_t max_tokens = 48;
  std::string keep;  // folder for the two traces; empty: a temporary one, removed
  bool json = false;
};

// A folder that goes away with its contents.
class TemporaryFolder {
 public:
  static Result<std::unique_ptr<TemporaryFolder>> Create() {
    std::error_code error;
    const fs::path above = fs::temp_directory_path(error);
    const char* asked = std::getenv("TMPDIR");
    if (error) {
      return Status::Environment(fmt::format("no folder for temporary files: TMPDIR={}: {}; set it to one that exists",
                                             asked == nullptr ? "" : asked, error.message()));
    }
    std::string path = (above / "assay-demo-XXXXXX").string();
    if (mkdtemp(path.data()) == nullptr) {
      return Status::Environment(fmt::format("cannot create the folder {}: {}; set TMPDIR to one that you can write to",
                                             path, std::strerror(errno)));
    }
    return std::unique_ptr<TemporaryFolder>(new TemporaryFolder(std::move(path)));
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  explicit TemporaryFolder(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

// The model lies beside the sources: looked for from the program's folder upwards, then from the current one.
Result<std::string> FindModel(const std::string& asked) {
  if (!asked.empty()) return asked;
  constexpr const char* kModel = "models/kjv-mla-10m";
  std::error_code error;
  for (const fs::path& start : {fs::read_symlink("/proc/self/exe", error).parent_path(), fs::current_path(error)}) {
    fs::path folder = start;
    for (int up = 0; up < 4; ++up, folder = folder.parent_path()) {
      for (const fs::path& candidate : {folder / kModel, folder / "share/assay" / kModel}) {
        if (fs::exists(candidate / "config.json", error)) return candidate.lexically_normal().string();
      }
    }
  }
  return Status::Usage(fmt::format("{} is neither near the program nor here; name it with --model", kModel));
}

// The model that both runs use.
struct Subject {
  std::string path;
  std::shared_ptr<const Checkpoint> checkpoint;
  ModelConfig config;
  std::unique_ptr<Tokenizer> tokenizer;
};

// asked: as --model was given; empty for the shipped model.
Result<Subject> LoadSubject(const std::string& asked) {
  Subject subject;
  ASSAY_ASSIGN_OR_RETURN(subject.path, FindModel(asked));
  ASSAY_ASSIGN_OR_RETURN(subject.checkpoint, Checkpoint::Open(subject.path));
  ASSAY_ASSIGN_OR_RETURN(subject.config, LoadModelConfig(subject.path));
  ASSAY_ASSIGN_OR_RETURN(subject.tokenizer, Tokenizer::Load(subject.path));
  if (!subject.config.mla()) {
    return Status::Usage(subject.path + ": the demo needs a model with latent attention (MLA)");
  }
  return subject;
}

// One run and what it left: text and trace.
struct DemoRun {
  std::string label;  // "absorbed, paged path"
  std::string text;   // generated, without the prompt
  std::string dir;
  std::unique_ptr<Trace> trace;
  double seconds = 0;
};

// Generates from the prompt and records every site into `dir`.
// The recorder closes before the trace is opened: what is compared is what a user would have on disk.
Result<DemoRun> Generate(const Subject& subject, const DemoOptions& demo, AttentionPath path, const std::string& fault,
                         const std::string& dir) {
  const auto start = std::chrono::steady_clock::now();
  EngineOptions options;
  options.path = path;
  options.max_tokens = demo.max_tokens;
  options.fault = fault;
  Settings settings;
  settings.profile = "all";
  settings.dir = dir;
  // Traces that stay are there to be diagnosed, which takes the operands' values; the demo itself needs none.
  if (!demo.keep.empty()) settings.level = Level::kPayload;
  PromptInput prompt;
  ASSAY_ASSIGN_OR_RETURN(prompt.tokens, subject.tokenizer->Encode(demo.prompt));
  ASSAY_RETURN_IF_ERROR(CheckPositions(subject.config, prompt.tokens.size(), demo.max_tokens, "ask for fewer"));
  ASSAY_ASSIGN_OR_RETURN(const auto engine, Engine::Create(subject.checkpoint, subject.config, options));
  ProcessInfo process = DescribeThisProcess();
  for (const auto& entry : engine->Describe()) process.meta.push_back(entry);
  ASSAY_ASSIGN_OR_RETURN(const auto recorder, Recorder::Open(settings, process));
  ASSAY_ASSIGN_OR_RETURN(const std::vector<Generation> generated, engine->Generate({prompt}, recorder.get()));
  ASSAY_RETURN_IF_ERROR(recorder->Close());

  DemoRun run;
  // A fault may need another path than asked for; what ran is what is said.
  run.label = engine->options().path == AttentionPath::kAbsorbed ? "absorbed, paged path" : "materialised path";
  run.text = subject.tokenizer->Decode(generated.at(0).tokens, true);
  run.dir = dir;
  ASSAY_ASSIGN_OR_RETURN(run.trace, Trace::Open(dir));
  run.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return run;
}

// The fault as the engine takes it, and the site that it breaks first.
struct Planted {
  std::string argument;  // "decode-output-unwritten@0"
  std::string first_bad;
  int layer = 0;                                  // 0 for a fault outside the layers
  AttentionPath path = AttentionPath::kAbsorbed;  // of the faulty run
  std::string what;
};

// Asks the engine's own plan where the fault will be, so that "found" is held against it.
Result<Planted> Plan(const DemoOptions& demo, const ModelConfig& config) {
  Planted planted;
  planted.argument = demo.fault;
  const FaultDef* def = FindFault(demo.fault);
  if (demo.layer >= 0) {
    planted.argument += fmt::format("@{}", demo.layer);
  } else if (def != nullptr && def->needs.layers != LayerKind::kNoLayer) {
    planted.argument += "@all";  // asks for the lowest layer; replaced below
  }
  EngineOptions options;
  options.fault = planted.argument;
  ModelConfig copy = config;
  ASSAY_ASSIGN_OR_RETURN(const FaultPlan plan, PlanFault(&options, &copy));
  if (plan.first_layer >= 0) planted.argument = fmt::format("{}@{}", demo.fault, plan.first_layer);
  planted.first_bad = plan.first_bad_site();
  planted.layer = static_cast<int>(std::max<int64_t>(plan.first_layer, 0));
  planted.what = plan.def->what;
  // Some faults bring a variant of the model that has no latent to absorb into.
  if (!copy.mla()) planted.path = AttentionPath::kMaterialised;
  return planted;
}

// All that the demo found, printed by one of two writers.
struct Demo {
  DemoOptions options;
  std::string model;
  Planted planted;
  DemoRun healthy, faulty;
  Result<HandPatch> healthy_patch = Status(), faulty_patch = Status();
  DiffResult diff;

  bool found() const { return !diff.findings.empty() && diff.findings[0].name == planted.first_bad; }
};

// Both runs get what the fault needs (none:NAME), so that they differ by the fault alone.
Result<Demo> Play(const DemoOptions& options) {
  Demo demo;
  demo.options = options;
  ASSAY_ASSIGN_OR_RETURN(const Subject subject, LoadSubject(options.model));
  demo.model = subject.path;
  ASSAY_ASSIGN_OR_RETURN(demo.planted, Plan(options, subject.config));
  ASSAY_ASSIGN_OR_RETURN(const auto temporary, TemporaryFolder::Create());
  const std::string folder = options.keep.empty() ? temporary->path() : options.keep;
  ASSAY_ASSIGN_OR_RETURN(demo.healthy, Generate(subject, options, AttentionPath::kMaterialised, "none:" + options.fault,
                                                folder + "/healthy"));
  ASSAY_ASSIGN_OR_RETURN(demo.faulty,
                         Generate(subject, options, demo.planted.path, demo.planted.argument, folder + "/faulty"));
  ASSAY_ASSIGN_OR_RETURN(demo.diff, Diff(*demo.healthy.trace, *demo.faulty.trace, {}));
  // The patch is read in the step that goes wrong first; without a finding, in the first one.
  const int64_t step = demo.diff.findings.empty() ? 0 : std::max<int64_t>(demo.diff.findings[0].step, 0);
  demo.healthy_patch = ReadHandPatch(*demo.healthy.trace, *subject.checkpoint, demo.planted.layer, step);
  demo.faulty_patch = ReadHandPatch(*demo.faulty.trace, *subject.checkpoint, demo.planted.layer, step);
  return demo;
}

// What the story's team saw: figures that are all in order.
std::string PatchText(const Demo& demo) {
  if (!demo.healthy_patch.ok() || !demo.faulty_patch.ok()) {
    const Status& status = demo.healthy_patch.ok() ? demo.faulty_patch.status() : demo.healthy_patch.status();
    return "  not in these runs: " + status.message() + "\n";
  }
  const HandPatch &a = *demo.healthy_patch, &b = *demo.faulty_patch;
  std::string text = fmt::format("  {:<12} {:<48} {}\n", "", demo.healthy.label, demo.faulty.label + ", fault planted");
  bool alike = true;
  for (size_t i = 0; i < a.figures.size(); ++i) {
    text += fmt::format("  {:<12} {:<48} {}\n", a.figures[i].name, a.figures[i].text(), b.figures[i].text());
    // Keys and values have another form on the absorbed path; what has one form must read the same.
    if (a.figures[i].shape == b.figures[i].shape) alike = alike && a.figures[i].text() == b.figures[i].text();
  }
  const bool healthy = a.healthy() && b.healthy();
  text += fmt::format("  {}, and {}.\n", healthy ? "All finite, none empty" : "NOT all finite and non-zero",
                      alike ? "the two runs read the same wherever they compute the same tensor"
                            : "the two runs DIFFER where they compute the same tensor");
  if (healthy && alike) text += "  Nothing here says what is wrong.\n";
  return text;
}

// Relative where that is shorter.
std::string Shown(const std::string& path) {
  std::error_code error;
  const std::string relative = fs::proximate(path, error).string();
  return !error && relative.size() < path.size() ? relative : path;
}

std::string ToText(const Demo& demo) {
  constexpr int kColumn = 52;
  std::string text = fmt::format("assay demo: {}, prompt \"{}\"\n\n", Shown(demo.model), demo.options.prompt);
  text += "1. What a user sees\n\n";
  text += SideBySide(demo.healthy.label, demo.faulty.label + ", fault planted", demo.options.prompt + demo.healthy.text,
                     demo.options.prompt + demo.faulty.text, kColumn);
  const auto& patch = demo.faulty_patch;
  text += "\n2. What a patch in the attention layer prints";
  if (patch.ok()) text += fmt::format(" (layer {}, step {}: {})", patch->layer, patch->step, patch->phase);
  text += "\n\n" + PatchText(demo);
  text += "\n3. What assay says (assay diff healthy faulty)\n\n";
  text += DiffText(demo.diff, "healthy", "faulty", false);
  text += fmt::format("\nPlanted: {} ({}), so {} is the first wrong tensor.\n", demo.planted.argument,
                      demo.planted.what, demo.planted.first_bad);
  text += demo.found() ? "Found: the same.\n"
                       : fmt::format("NOT found: {}.\n",
                                     demo.diff.findings.empty() ? "nothing was reported" : demo.diff.findings[0].name);
  return text;
}

// {"absent": why} where a run has no such tensors.
Json ToJson(const Result<HandPatch>& patch) {
  if (!patch.ok()) return {{"absent", patch.status().message()}};
  Json figures = Json::array();
  for (const Figure& figure : patch->figures) {
    figures.push_back({{"name", figure.name},
                       {"shape", figure.shape},
                       {"norm", JsonNumber(figure.norm)},
                       {"nonfinite", figure.nonfinite},
                       {"note", figure.note}});
  }
  return {{"layer", patch->layer},
          {"step", patch->step},
          {"phase", patch->phase},
          {"healthy", patch->healthy()},
          {"figures", figures}};
}

// assay.demo/1 of docs/json.md.
Json ToJson(const Demo& demo) {
  const auto run = [](const DemoRun& r, const Result<HandPatch>& patch) {
    return Json{{"label", r.label}, {"text", r.text}, {"seconds", r.seconds}, {"hand_patch", ToJson(patch)}};
  };
  return {{"schema", "assay.demo/1"},
          {"version", ASSAY_VERSION},
          {"model", demo.model},
          {"prompt", demo.options.prompt},
          {"fault", demo.planted.argument},
          {"planted", demo.planted.first_bad},
          {"found", demo.found()},
          {"healthy", run(demo.healthy, demo.healthy_patch)},
          {"faulty", run(demo.faulty, demo.faulty_patch)},
          {"diff", DiffJson(demo.diff, demo.healthy.dir, demo.faulty.dir)}};
}

// Exits 1 when the diff did not find the fault: the demo is a test of itself.
int RunDemo(const DemoOptions& options) {
  const Result<Demo> demo = Play(options);
  if (!demo.ok()) return Fail("demo", demo.status());
  const std::string text = options.json ? WriteJson(ToJson(*demo)) + "\n" : ToText(*demo);
  std::fwrite(text.data(), 1, text.size(), stdout);
  if (!options.keep.empty())
    std::fprintf(stderr, "assay demo: traces in %s; next: assay diagnose %s/faulty\n", options.keep.c_str(),
                 options.keep.c_str());
  return demo->found() ? kExitOk : kExitDifference;
}

}  // namespace

void AddDemoCommand(CLI::App& app, int* exit_code) {
  const auto options = std::make_shared<DemoOptions>();
  CLI::App* command = app.add_subcommand("demo", "Plant a fault in the shipped model, and find it");
  command->add_option("--prompt", options->prompt, "Text to go on from")->capture_default_str();
  command->add_option("--fault", options->fault, "Fault to plant (assay reference --list-faults)")
      ->capture_default_str();
  command->add_option("--layer", options->layer, "Layer to plant it in, from 0; default: the lowest where it can be")
      ->check(NonNegative());
  command->add_option("--max-tokens", options->max_tokens, "Tokens to generate")
      ->check(CLI::Range(int64_t{1}, int64_t{1024}))
      ->capture_default_str();
  command->add_option("--model", options->model, "Checkpoint folder; default: models/kjv-mla-10m near the program");
  command->add_option("--keep", options->keep, "Keep the two traces, with values, in this folder");
  command->add_flag("--json", options->json, "Print JSON, schema assay.demo/1");
  command->footer(
      "Examples:\n"
      "  assay demo\n"
      "  assay demo --prompt \"The LORD is my shepherd\" --fault lse-base-2 --layer 3\n"
      "  assay demo --keep story && assay diagnose story/faulty\n"
      "Exits 0 when the first wrong tensor is found where the fault was planted, 1 when not.");
  command->callback([options, exit_code] { *exit_code = RunDemo(*options); });
}

}  // namespace assay::cli
