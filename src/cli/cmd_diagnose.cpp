// `assay diagnose TRACE [OTHER]`: every hypothesis of the ladder, then the verdict.
#include <cstdio>
#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "diagnose/diagnose.h"
#include "report/diagnose_report.h"
#include "trace/reader.h"

namespace assay::cli {
namespace {

struct Options {
  std::string a, b;  // b empty: one trace
  bool json = false;
};

int RunDiagnose(const Options& options) {
  auto a = Trace::Open(options.a);
  if (!a.ok()) return Fail("diagnose", a.status());
  Result<Diagnosis> diagnosis = Status::Internal("not run");
  if (options.b.empty()) {
    diagnosis = Diagnose(**a);
  } else {
    auto b = Trace::Open(options.b);
    if (!b.ok()) return Fail("diagnose", b.status());
    diagnosis = Diagnose(**a, **b);
  }
  if (!diagnosis.ok()) return Fail("diagnose", diagnosis.status());
  const std::string& judged = options.b.empty() ? options.a : options.b;
  const std::string text = options.json ? WriteJson(DiagnoseJson(*diagnosis, judged, options.a)) + "\n"
                                        : DiagnoseText(*diagnosis, judged, options.a);
  std::fputs(text.c_str(), stdout);
  if (!diagnosis->findings.empty()) return kExitDifference;
  return diagnosis->compared && diagnosis->comparison == Verdict::kIncomparable ? kExitBadInput : kExitOk;
}

}  // namespace

void AddDiagnoseCommand(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("diagnose", "Walk the ladder of causes and name the fault");
  command->add_option("TRACE", options->a, "Trace folder or file; with OTHER: the run that is trusted")->required();
  command->add_option("OTHER", options->b, "Trace folder or file: the run in question");
  command->add_flag("--json", options->json, "JSON on stdout, schema assay.diagnose/1");
  command->footer(
      "Each hypothesis is confirmed, ruled out or not testable; what is not testable says what to record. One trace "
      "is\n"
      "judged by itself, which needs payloads of the operands (docs/adding-a-case.md); of two the second is judged, "
      "and\n"
      "compared with the first. Exit: 0 nothing found, 1 fault, 3 incomparable or damaged.\n\n"
      "Examples:\n"
      "  assay diagnose run.trace\n"
      "  assay diagnose good.trace bad.trace --json");
  command->callback([options, exit_code] { *exit_code = RunDiagnose(*options); });
}

}  // namespace assay::cli
