// `assay diff A B`: the first tensor whose inputs agree and whose value does not.
#include <cstdio>
#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "compare/diff.h"
#include "report/diff_report.h"
#include "report/text_table.h"
#include "trace/reader.h"

namespace assay::cli {
namespace {

struct Options {
  std::string a, b;
  DiffOptions diff;
  bool json = false, all = false;
};

// `same` of a damaged trace is not 0: what was lost may differ.
int RunDiff(const Options& options) {
  auto a = Trace::Open(options.a);
  if (!a.ok()) return Fail("diff", a.status());
  auto b = Trace::Open(options.b);
  if (!b.ok()) return Fail("diff", b.status());
  auto result = Diff(**a, **b, options.diff);
  if (!result.ok()) return Fail("diff", result.status());
  const std::string text = options.json ? WriteJson(DiffJson(*result, options.a, options.b)) + "\n"
                                        : Printable(DiffText(*result, options.a, options.b, options.all), true);
  std::fputs(text.c_str(), stdout);
  switch (result->verdict) {
    case Verdict::kSame:
    case Verdict::kNoise:
      if (!result->coverage.damaged) return kExitOk;
      std::fprintf(stderr,
                   "assay diff: a trace is damaged (the notes say where): the verdict holds for what could be read. "
                   "Record it again\n");
      return kExitBadInput;
    case Verdict::kFault:
      return kExitDifference;
    case Verdict::kIncomparable:
      break;
  }
  return kExitBadInput;
}

}  // namespace

void AddDiffCommand(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("diff", "Compare two traces and name the first wrong tensor");
  command->add_option("A", options->a, "Trace folder or file: the run that is trusted")->required();
  command->add_option("B", options->b, "Trace folder or file: the run in question")->required();
  command->add_option("--tolerance", options->diff.tolerance,
                      "Relative L2 tolerance instead of the derived bound: \"1e-5\" or \"1e-5,layers.*.q:1e-3\"");
  command->add_option("--floor", options->diff.floor_trace,
                      "Trace of A's program once more, its inputs disturbed by one unit in the last place: bounds rise "
                      "to 4 times its difference");
  command->add_option("--threads", options->diff.threads, "Threads; 0: all cores")->check(NonNegative());
  CLI::Option* all =
      command->add_flag("--all", options->all, "List every site, not only those around the first wrong one");
  CLI::Option* json = command->add_flag("--json", options->json, "JSON on stdout, schema assay.diff/1");
  all->excludes(json);  // which has everything
  command->footer(
      "Rows are aligned by canonical name, request and position, whatever the batching, chunks and shards. Verdicts:\n"
      "same (bit-identical), noise (within the derived bound), fault, incomparable (nothing in common). docs/diff.md\n"
      "tells how bounds are derived. Exit: 0 same or noise, 1 fault, 3 incomparable, or same or noise in what a "
      "damaged\n"
      "trace has left.\n\n"
      "Examples:\n"
      "  assay diff good.trace bad.trace\n"
      "  assay diff a b --tolerance '1e-5,layers.*.attn.q:1e-3' --json");
  command->callback([options, exit_code] { *exit_code = RunDiff(*options); });
}

}  // namespace assay::cli
