// `assay check TRACE`: what is wrong in one recording, without a second one.
#include <cstdio>
#include <memory>
#include <string>

#include "capture/capture.h"
#include "check/check.h"
#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "report/check_report.h"
#include "report/text_table.h"

namespace assay::cli {
namespace {

struct Options {
  std::string trace;
  CheckOptions check;
  bool json = false, list = false;
};

int RunCheck(const Options& options, const CLI::App& command) {
  if (options.list) {
    const std::string other = WithoutEffect(command, "--list", {"--json"});
    if (!other.empty()) return Fail("check", Status::Usage(other));
    std::fputs((options.json ? WriteJson(CheckListJson()) + "\n" : CheckListText()).c_str(), stdout);
    return kExitOk;
  }
  if (options.trace.empty()) return Fail("check", Status::Usage("TRACE is required: a trace folder or file"));
  auto capture = Capture::Open(options.trace);
  if (!capture.ok()) return Fail("check", capture.status());
  auto result = RunChecks(**capture, options.check);
  if (!result.ok()) return Fail("check", result.status());
  if (result->coverage.checks_run == 0) return Fail("check", Status::Usage("--only and --skip leave no check to run"));
  if ((*capture)->event_count() == 0) {
    return Fail("check", Status::BadInput(options.trace + " has no events: nothing can be checked"));
  }
  const std::string text = options.json ? WriteJson(CheckJson(*result, options.trace)) + "\n"
                                        : Printable(CheckText(*result, options.trace), true);
  std::fputs(text.c_str(), stdout);
  const bool damaged = SayDamages("check", (*capture)->trace());
  if (!result->findings.empty()) return kExitDifference;
  return damaged ? kExitBadInput : kExitOk;
}

}  // namespace

void AddCheckCommand(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("check", "Judge one trace without a second one");
  command->add_option("TRACE", options->trace, "Trace folder or file");
  command->add_option("--only", options->check.only, "Names of checks to run, with commas; default: all")
      ->delimiter(',')
      ->allow_extra_args(false);
  command->add_option("--skip", options->check.skip, "Names of checks to leave out, with commas")
      ->delimiter(',')
      ->allow_extra_args(false);
  command->add_flag("--list", options->list, "List the checks and what they need, and stop");
  command->add_flag("--json", options->json, "JSON on stdout, schema assay.check/1; with --list assay.checks/1");
  command->footer(
      "Each hypothesis is confirmed, ruled out or not testable, with numbers and with what to record to make it "
      "testable.\n"
      "Statistics suffice for some checks, others need values (ASSAY_LEVEL=payload). docs/checks.md describes each.\n"
      "Exit: 0 nothing found, 1 a fault, 3 damaged or empty trace.\n\n"
      "Examples:\n"
      "  assay check run.trace\n"
      "  assay check run.trace --only nonfinite,stale_rows --json");
  command->callback([options, exit_code, command] { *exit_code = RunCheck(*options, *command); });
}

}  // namespace assay::cli
