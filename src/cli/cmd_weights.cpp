// assay weights: audits a checkpoint, and the weights that an engine has in memory against it.
#include <fnmatch.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "check/weights_audit.h"
#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "model/config.h"
#include "model/weights_match.h"
#include "quant/export.h"
#include "quant/weight_source.h"
#include "report/text_table.h"
#include "report/weights_report.h"
#include "trace/reader.h"

namespace assay::cli {
namespace {

struct Options {
  std::string checkpoint, trace, decode, only;
  int threads = 0;
  bool json = false, all = false;
};

bool AnyCompared(const std::vector<MemoryCheck>& memory) {
  return std::any_of(memory.begin(), memory.end(), [](const MemoryCheck& c) { return !c.checkpoint.empty(); });
}

// Nothing was held against the checkpoint: that says nothing of the weights in memory, and is no success.
Status NothingCompared(const std::vector<MemoryCheck>& memory, const Options& options) {
  std::string why = options.trace + ": no weight in memory could be compared with the checkpoint: ";
  if (memory.empty()) return Status::BadInput(why + "it holds none (phase load, level payload)");
  why += std::to_string(memory.size()) + " were recorded, ";
  return Status::BadInput(why + "the first, " + memory[0].name + ", was not: " + memory[0].note);
}

// kUsage: `file` would replace one that lies where the checkpoint does.
Status OutsideCheckpoint(const std::string& file, const std::string& checkpoint) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  const auto folder = [&](const fs::path& path) {
    return fs::is_directory(path, ignored) ? path : path.has_parent_path() ? path.parent_path() : fs::path(".");
  };
  if (!fs::exists(file, ignored) || !fs::equivalent(folder(file), folder(checkpoint), ignored)) return {};
  return Status::Usage("--decode: " + file + " lies beside the checkpoint's files and exists; name another file");
}

// Names and shapes against the configuration, as far as it is one that the runtime reads. A part of a model lacks
// nothing.
void HoldAgainst(const WeightSource& source, WeightsOptions* audit, std::vector<std::string>* notes) {
  if (source.config().is_null()) return notes->push_back("no configuration: names and shapes are not judged");
  const Result<ModelConfig> config = ParseModelConfig(WriteJson(source.config(), -1), source.config_file());
  if (!config.ok()) {
    return notes->push_back("names and shapes are not held against the configuration: " + config.status().message());
  }
  audit->held_against_config = true;
  std::vector<std::string> left_out;  // the audit has its own words for it
  const bool whole = source.find(kEmbedding) != nullptr && source.find(kFinalNorm) != nullptr;
  for (WeightMismatch& wrong : HoldAgainstConfig(source, *config, &left_out)) {
    const std::string& name = wrong.problem.name;
    if (name == "rope_freqs.weight") continue;  // GGUF's factors of RoPE frequencies: no key says whether they belong
    if ((wrong.missing && !whole) || FindProblem(source, name) != nullptr) continue;
    if (!audit->only.empty() && ::fnmatch(audit->only.c_str(), name.c_str(), 0) != 0) continue;
    audit->mismatches.push_back(std::move(wrong.problem));
  }
}

Status Weights(const Options& options, int* exit_code) {
  ASSAY_ASSIGN_OR_RETURN(const auto source, WeightSource::Open(options.checkpoint));
  if (source->weights().empty()) {  // nothing to judge is no success
    const auto& problems = source->problems();
    const auto wrong = [](const WeightProblem& problem) { return !problem.cls.empty(); };
    if (problems.empty()) return Status::BadInput(options.checkpoint + ": holds no weights");
    if (std::none_of(problems.begin(), problems.end(), wrong)) {
      return Status::BadInput(options.checkpoint + ": no weight is of a format that is decoded: " + problems[0].what);
    }
  }
  const auto chosen = [&](const WeightPtr& weight) {
    return ::fnmatch(options.only.c_str(), weight->name().c_str(), 0) == 0;
  };
  if (!options.only.empty() && std::none_of(source->weights().begin(), source->weights().end(), chosen)) {
    return Status::Usage("--only: no weight of " + options.checkpoint + " matches " + options.only);
  }
  if (!options.decode.empty()) {
    ASSAY_RETURN_IF_ERROR(OutsideCheckpoint(options.decode, options.checkpoint));
    constexpr uint64_t kLimit = uint64_t{64} << 30;
    ASSAY_RETURN_IF_ERROR(ExportDecoded(*source, options.only, kLimit, options.decode));
  }
  std::unique_ptr<Trace> trace;
  if (!options.trace.empty()) {
    ASSAY_ASSIGN_OR_RETURN(trace, Trace::Open(options.trace));
  }
  WeightsOptions audit;
  audit.only = options.only;
  audit.threads = options.threads;
  std::vector<std::string> notes;
  HoldAgainst(*source, &audit, &notes);
  ASSAY_ASSIGN_OR_RETURN(WeightsResult result, AuditWeights(*source, trace.get(), audit));
  result.notes.insert(result.notes.end(), notes.begin(), notes.end());
  const std::string text = options.json ? WriteJson(WeightsJson(result, options.checkpoint, options.trace)) + "\n"
                                        : Printable(WeightsText(result, options.all), true);
  std::fputs(text.c_str(), stdout);
  *exit_code = result.findings.empty() ? kExitOk : kExitDifference;
  if (trace == nullptr || !result.findings.empty()) return {};
  if (SayDamages("weights", *trace)) *exit_code = kExitBadInput;
  return AnyCompared(result.memory) ? Status() : NothingCompared(result.memory, options);
}

}  // namespace

void AddWeightsCommand(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("weights", "Audit a checkpoint, and the weights in memory against it");
  command->add_option("CHECKPOINT", options->checkpoint, "Folder with safetensors, or a GGUF file")->required();
  command->add_option("--trace", options->trace, "Trace with the weights in memory, phase load, level payload");
  command->add_option("--only", options->only, "Glob over checkpoint names: leave out the others");
  command->add_option("--decode", options->decode,
                      "Also write the decoded weights to this safetensors file, as float32");
  CLI::Option* all = command->add_flag("--all", options->all, "A line for every weight, not only one for every format");
  command->add_option("--threads", options->threads, "Threads; 0: all cores")->check(CLI::NonNegativeNumber);
  CLI::Option* json = command->add_flag("--json", options->json, "JSON on stdout, schema assay.weights/1");
  all->excludes(json);  // which has everything
  command->footer(
      "Examples:\n"
      "  assay weights models/kjv-mla-10m\n"
      "  assay weights GLM-5-NVFP4 --trace run1 --json");
  command->callback([options, exit_code] {
    const Status status = Weights(*options, exit_code);
    if (!status.ok()) *exit_code = Fail("weights", status);
  });
}

}  // namespace assay::cli
