// `assay diagnose TRACE [OTHER]` and `assay diagnose -- COMMAND`: every hypothesis of the ladder, then the verdict.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "cli/recorded_command.h"
#include "diagnose/diagnose.h"
#include "report/diagnose_report.h"
#include "report/text_table.h"
#include "trace/reader.h"

namespace assay::cli {
namespace {

struct Options {
  std::vector<std::string> words;  // one or two traces; live: a command
  bool live = false;
  bool json = false;
};

// Runs the command with values recorded, its stdout on our stderr, and gives the folder of its trace.
Result<std::string> Record(const std::vector<std::string>& command) {
  std::map<std::string, std::string> knobs;
  for (const char* variable : {"ASSAY_LEVEL", "ASSAY_TOKENS"}) {  // oracles need the operands
    if (const char* value = std::getenv(variable); value == nullptr || *value == '\0')
      knobs[variable] = std::strcmp(variable, "ASSAY_LEVEL") == 0 ? "payload" : "on";
  }
  ASSAY_ASSIGN_OR_RETURN(const Settings settings, SettingsForCommand(knobs));
  if (settings.sink == "stderr" || settings.dir.find('%') != std::string::npos)
    return Status::Usage("diagnose needs a trace in one folder: no sink stderr, no % in ASSAY_DIR but %i");
  auto child = RunRecorded(settings, command, true);
  if (!child.ok()) return child.status();
  if (!child->started) return Status::Usage("cannot start " + command[0] + ": " + std::strerror(child->start_errno));
  if (child->shell_code() != 0)
    std::fprintf(stderr, "assay diagnose: the command ended with %d; what it recorded is judged\n",
                 child->shell_code());
  return settings.dir;
}

int RunDiagnose(const Options& options) {
  std::vector<std::string> traces = options.words;
  if (options.live) {
    if (traces.empty()) return Fail("diagnose", Status::Usage("a command is expected behind --"));
    auto folder = Record(traces);
    if (!folder.ok()) return Fail("diagnose", folder.status());
    traces = {*folder};
  }
  if (traces.empty() || traces.size() > 2)
    return Fail("diagnose", Status::Usage("one or two traces, or -- COMMAND, are expected"));
  auto a = Trace::Open(traces[0]);
  if (options.live && !a.ok() && a.status().code() == Code::kBadInput)
    return Fail("diagnose", Status::BadInput(kNothingRecorded));
  if (!a.ok()) return Fail("diagnose", a.status());
  Result<Diagnosis> diagnosis = Status::Internal("not run");
  Result<std::unique_ptr<Trace>> b = Status::Internal("not opened");
  std::vector<const Trace*> judged{a->get()};
  if (traces.size() == 1) {
    diagnosis = Diagnose(**a);
  } else {
    b = Trace::Open(traces[1]);
    if (!b.ok()) return Fail("diagnose", b.status());
    judged.push_back(b->get());
    diagnosis = Diagnose(**a, **b);
  }
  if (!diagnosis.ok()) return Fail("diagnose", diagnosis.status());
  if (diagnosis->coverage.events == 0)
    return Fail("diagnose", Status::BadInput(traces.back() + " has no events: nothing can be judged"));
  const std::string text = options.json ? WriteJson(DiagnoseJson(*diagnosis, traces.back(), traces[0])) + "\n"
                                        : Printable(DiagnoseText(*diagnosis, traces.back(), traces[0]), true);
  std::fputs(text.c_str(), stdout);
  bool damaged = false;
  for (const Trace* trace : judged) damaged = SayDamages("diagnose", *trace) || damaged;
  if (!diagnosis->findings.empty()) return kExitDifference;
  if (damaged) return kExitBadInput;
  return diagnosis->compared && diagnosis->comparison == Verdict::kIncomparable ? kExitBadInput : kExitOk;
}

}  // namespace

void AddDiagnoseCommand(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("diagnose", "Walk the ladder of causes and name the fault");
  command->add_option("TRACE", options->words, "A trace; or a trusted one and the one in question; or -- COMMAND")
      ->type_name("[OTHER] | -- COMMAND [ARGUMENT...]");
  command->add_flag("--live", options->live, "The words are a command to run and judge; -- in front of it says so too");
  command->add_flag("--json", options->json, "JSON on stdout, schema assay.diagnose/1");
  command->footer(
      "Each hypothesis is confirmed, ruled out or not testable; what is not testable says what to record. One trace "
      "is\n"
      "judged by itself, which needs payloads of the operands (docs/adding-a-case.md); of two the second is judged, "
      "and\n"
      "compared with the first. A command runs as under `assay run`, at level payload with tokens unless ASSAY_LEVEL\n"
      "and ASSAY_TOKENS say otherwise; its output goes to stderr. Exit: 0 nothing found, 1 fault, 3 incomparable or\n"
      "damaged.\n\n"
      "Examples:\n"
      "  assay diagnose run.trace\n"
      "  assay diagnose good.trace bad.trace --json\n"
      "  assay diagnose -- python generate.py");
  command->callback([options, exit_code] { *exit_code = RunDiagnose(*options); });
}

}  // namespace assay::cli
