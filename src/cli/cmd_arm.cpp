// `assay arm` and `assay disarm`: switch the recording of running processes on and off, by their control files.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/version.h"
#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "io/json.h"
#include "probe/control.h"
#include "probe/settings.h"
#include "report/text_table.h"
#include "trace/reader.h"

namespace assay::cli {
namespace {

// steps: in the grammar of ASSAY_STEPS; requests: keys.
struct ArmOptions {
  std::string target, steps, requests;
  bool json = false;
};

// Keys that begin with the first eight digits of one, in the traces that the control files at `paths` belong to.
std::vector<uint64_t> KeysThatBeginWith(uint64_t first, const std::vector<std::string>& paths) {
  std::set<std::string> folders;
  for (const std::string& path : paths) folders.insert(std::filesystem::path(path).parent_path().string());
  std::set<uint64_t> keys;
  for (const std::string& folder : folders) {
    const auto trace = Trace::Open(folder);
    if (!trace.ok()) continue;  // nothing is in it yet
    for (const TraceProcess& process : (*trace)->processes()) {
      for (const RequestInfo& request : process.requests) {
        if (request.key >> 32 == first) keys.insert(request.key);
      }
    }
  }
  return {keys.begin(), keys.end()};
}

// "0123456789abcdef", with or without 0x, separated by commas; or the first eight digits, which `assay show` prints.
Result<std::vector<uint64_t>> ReadRequests(const std::string& text, const std::vector<std::string>& paths) {
  std::vector<uint64_t> keys;
  for (size_t start = 0; start < text.size();) {
    const size_t comma = std::min(text.find(',', start), text.size());
    std::string one = text.substr(start, comma - start);
    if (one.rfind("0x", 0) == 0) one = one.substr(2);
    if ((one.size() != 16 && one.size() != 8) || one.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) {
      return Status::Usage(
          fmt::format("--requests, column {}: expected a request's key, 16 hexadecimal digits or the first 8, found "
                      "\"{}\"; `assay show --json` lists the keys under \"requests\"",
                      start + 1, text.substr(start, 24)));
    }
    const uint64_t key = std::stoull(one, nullptr, 16);
    if (one.size() == 16) {
      keys.push_back(key);
    } else {
      const std::vector<uint64_t> known = KeysThatBeginWith(key, paths);
      if (known.empty()) {
        return Status::Usage(
            fmt::format("--requests, column {}: no request recorded so far has a key that begins with "
                        "{}; one that is yet to come needs all 16 digits",
                        start + 1, one));
      }
      keys.insert(keys.end(), known.begin(), known.end());
    }
    start = comma + 1;
  }
  if (keys.size() > kControlRequests) return Status::Usage(fmt::format("--requests: at most {}", kControlRequests));
  return keys;
}

// Steps go through the settings' own parser: one grammar, one set of messages.
Result<Selection> ReadSelection(const ArmOptions& options, const std::vector<std::string>& paths) {
  Selection selection;
  if (!options.steps.empty()) {
    const std::vector<std::string> assignments = {"ASSAY=all", "ASSAY_STEPS=" + options.steps};
    ASSAY_ASSIGN_OR_RETURN(const Settings settings,
                           ParseSettings([&](std::string_view name) -> std::optional<std::string> {
                             for (const std::string& a : assignments) {
                               if (a.rfind(std::string(name) + "=", 0) == 0) return a.substr(name.size() + 1);
                             }
                             return std::nullopt;
                           }));
    selection.has_steps = true;
    selection.steps = settings.steps;
    if (selection.steps.ranges.size() > kControlSteps) {
      return Status::Usage(fmt::format("--steps: at most {} intervals", kControlSteps));
    }
  }
  ASSAY_ASSIGN_OR_RETURN(selection.requests, ReadRequests(options.requests, paths));
  return selection;
}

// A process that cannot be armed does not keep the others from it.
Result<int> Arm(const ArmOptions& options, bool on) {
  const auto found = FindControlFiles(options.target);
  const std::vector<std::string> paths = found.ok() ? *found : std::vector<std::string>();
  // What is wrong with the options is said first.
  ASSAY_ASSIGN_OR_RETURN(const Selection selection, ReadSelection(options, paths));
  if (!found.ok()) return found.status();
  std::vector<ControlledProcess> processes;
  for (const std::string& path : paths) processes.push_back(WriteControl(path, on, selection));
  size_t done = 0;
  Json list = Json::array();
  for (const ControlledProcess& process : processes) {
    done += process.problem.empty() ? 1 : 0;
    list.push_back({{"control", process.path},
                    {"host", process.host},
                    {"pid", process.pid},
                    {"was_armed", process.was_armed},
                    {"armed", process.problem.empty() ? on : process.was_armed},
                    {"problem", process.problem}});
    if (!process.problem.empty()) {
      std::fprintf(stderr, "assay %s: %s: %s\n", on ? "arm" : "disarm", Printable(process.path, false).c_str(),
                   Printable(process.problem, false).c_str());
    } else if (!options.json) {
      fmt::print("{} pid {}: {}{}\n", Printable(process.host, false), process.pid, on ? "armed" : "disarmed",
                 process.was_armed == on ? " (as before)" : "");
    }
  }
  const int code = done != 0 ? kExitOk : kExitBadInput;
  if (options.json) {
    const Json report = {{"schema", "assay.arm/1"}, {"version", ASSAY_VERSION}, {"armed", on},
                         {"changed", done},         {"exit_code", code},        {"processes", list}};
    fmt::print("{}\n", WriteJson(report));
  }
  return code;
}

void Add(CLI::App& app, int* exit_code, bool on) {
  CLI::App* command =
      app.add_subcommand(on ? "arm" : "disarm", on ? "Switch the recording of running processes on, or narrow it"
                                                   : "Switch the recording of running processes off");
  const auto options = std::make_shared<ArmOptions>();
  command
      ->add_option("target", options->target,
                   "The trace folder that the processes record into, or a process, its children included")
      ->required()
      ->type_name("TRACE|PID");
  if (on) {
    command
        ->add_option("--steps", options->steps, "Engine steps that record from now on, as in 100-110; all: every step")
        ->type_name("INTERVALS");
    command
        ->add_option("--requests", options->requests,
                     "Keys of the requests whose rows record from now on, 16 digits or the first 8")
        ->type_name("KEY[,KEY...]");
  }
  command->add_flag("--json", options->json, "Result as JSON, schema assay.arm/1");
  command->footer(
      on ? "Without --steps and --requests what was narrowed before is widened again to the settings that the process\n"
           "started with. A process that starts with ASSAY_ARMED=off records nothing until it is armed.\n"
           "Examples:\n"
           "  assay arm assay-trace-0 --steps 100-110\n"
           "  assay arm 4711\n"
           "Exit code: 0 when at least one process was armed, 3 when none records there."
         : "The recording stays open, and a probe costs one load.\n"
           "Example:\n"
           "  assay disarm assay-trace-0\n"
           "Exit code: 0 when at least one process was "
           "disarmed,\n"
           "3 when none records there.");
  command->callback([options, exit_code, on] {
    const Result<int> code = Arm(*options, on);
    *exit_code = code.ok() ? *code : Fail(on ? "arm" : "disarm", code.status());
  });
}

}  // namespace

void AddArmCommand(CLI::App& app, int* exit_code) { Add(app, exit_code, true); }
void AddDisarmCommand(CLI::App& app, int* exit_code) { Add(app, exit_code, false); }

}  // namespace assay::cli
