// `assay run [options] -- COMMAND`: sets ASSAY* in the environment, runs the command, says what was recorded and what
// was not, and passes the command's exit code on.
#include <fmt/format.h>
#include <glob.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/version.h"
#include "cli/child_process.h"
#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "cli/recorded_command.h"
#include "io/json.h"
#include "probe/settings.h"
#include "report/show_report.h"
#include "report/text_table.h"
#include "trace/reader.h"

namespace assay::cli {
namespace {

namespace fs = std::filesystem;

// json_file "-": stdout, which is the report's alone: what the command writes there goes to stderr.
struct RunOptions {
  std::map<std::string, std::string> knobs;  // variable -> value, of those given
  std::vector<std::string> command;
  std::string json_file;
  bool quiet = false;
};

// "ASSAY_LEVEL" -> "--level", "ASSAY" -> "--profile".
std::string OptionName(std::string_view variable) {
  if (variable == "ASSAY") return "--profile";
  std::string name = "--";
  for (char c : variable.substr(6)) name += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return name;
}

// Folders that the pattern names once the processes have put their rank, pid and host in.
// Escapes (%r, %p, %h of probe/settings.h) become *: their values in the command's processes are not known here.
std::vector<std::string> FoldersOf(const std::string& dir) {
  std::string pattern;
  for (size_t i = 0; i < dir.size(); ++i) {
    if (dir[i] == '%' && i + 1 < dir.size()) {
      pattern += dir[++i] == '%' ? '%' : '*';
    } else {
      if (std::string_view("*?[\\").find(dir[i]) != std::string_view::npos) pattern += '\\';
      pattern += dir[i];
    }
  }
  glob_t found{};
  std::vector<std::string> folders;
  if (::glob(pattern.c_str(), 0, nullptr, &found) == 0) {
    for (size_t i = 0; i < found.gl_pathc; ++i) folders.emplace_back(found.gl_pathv[i]);
  }
  ::globfree(&found);
  return folders;
}

// One trace file that this run left.
struct ProcessSummary {
  std::string file;
  int32_t rank = 0;
  int64_t pid = 0;
  uint64_t events = 0, sites = 0;
  DropCounts drops;
  bool closed = false;
  std::vector<CoverageNote> coverage;
};

// What the report is made of; both writers, text and JSON, print this and read nothing else.
struct RunReport {
  ChildResult child;
  std::vector<std::string> folders;
  std::vector<ProcessSummary> processes;
  std::vector<std::string> problems;  // traces that could not be read, damage
  std::vector<std::string> unseen;    // selectors of ASSAY_PROBES on which no process has a note

  // Over all processes of this run.
  uint64_t events() const {
    uint64_t sum = 0;
    for (const ProcessSummary& p : processes) sum += p.events;
    return sum;
  }
  uint64_t dropped() const {
    uint64_t sum = 0;
    for (const ProcessSummary& p : processes) sum += p.drops.total();
    return sum;
  }
  // A probe that another process of the run has in place, or that fired there: what it is not found in, and where it
  // never fired, does not matter. A process that was killed did not come to say what fired.
  bool SeenElsewhere(const CoverageNote& note) const {
    const bool missing = note.reason == "not found";
    if (!missing && note.reason != "never fired") return false;
    for (const ProcessSummary& p : processes) {
      for (const CoverageNote& other : p.coverage) {
        if (other.site != note.site) continue;
        if (other.reason == "fired" || (other.reason == "attached" && (missing || !p.closed))) return true;
      }
    }
    return false;
  }
  // Coverage notes with this reason that count against the run.
  uint64_t Notes(std::string_view reason) const {
    uint64_t n = 0;
    for (const ProcessSummary& p : processes) {
      for (const CoverageNote& note : p.coverage) n += note.reason == reason && !SeenElsewhere(note) ? 1 : 0;
    }
    return n;
  }
};

// Reads what the run left. before: files that were there already.
void ReadTraces(const std::string& dir, const std::set<std::string>& before, RunReport* report) {
  for (const std::string& folder : FoldersOf(dir)) {
    const Result<std::unique_ptr<Trace>> trace = Trace::Open(folder);
    if (!trace.ok()) {
      report->problems.push_back(trace.status().message());
      continue;
    }
    const size_t first = report->processes.size();
    // Place of each file of the trace in report->processes; SIZE_MAX for older recordings.
    std::vector<size_t> index;
    for (const TraceProcess& process : (*trace)->processes()) {
      if (before.count(process.file)) {
        index.push_back(SIZE_MAX);
        continue;
      }
      index.push_back(report->processes.size());
      report->processes.push_back({process.file, process.info.rank, process.info.pid, 0, process.sites.size(),
                                   process.drops, process.closed, process.coverage});
    }
    if (report->processes.size() == first) continue;
    report->folders.push_back(folder);
    for (uint64_t i = 0; i < (*trace)->event_count(); ++i) {
      const size_t of = index[(*trace)->event(i).file()];
      if (of != SIZE_MAX) ++report->processes[of].events;
    }
    for (const Damage& damage : (*trace)->damages()) {
      if (!damage.benign) {
        report->problems.push_back(fmt::format("{}: {} at offset {}, {} bytes skipped", damage.file, damage.what,
                                               damage.offset, damage.size_bytes));
      }
    }
  }
}

// Selectors of ASSAY_PROBES that no process says anything of: a process attaches itself when it comes to the module of
// a probe, so one that never does has no note to write, and no trace to write it to.
std::vector<std::string> UnseenProbes(const std::string& probes, const RunReport& report) {
  std::set<std::string> seen;
  for (const ProcessSummary& process : report.processes) {
    for (const CoverageNote& note : process.coverage) seen.insert(note.site);
  }
  std::vector<std::string> unseen;
  for (size_t start = 0; start < probes.size();) {
    const size_t comma = std::min(probes.find(',', start), probes.size());
    std::string one = probes.substr(start, comma - start);
    if (!one.empty() && seen.count(one) == 0) unseen.push_back(std::move(one));
    start = comma + 1;
  }
  return unseen;
}

// A folder may hold older recordings, which are not this run's.
std::set<std::string> FilesBefore(const std::string& dir) {
  RunReport report;
  ReadTraces(dir, {}, &report);
  std::set<std::string> files;
  for (const ProcessSummary& process : report.processes) files.insert(process.file);
  return files;
}

// to_stderr: the sink was stderr, so there is no trace to tell of.
std::string ToText(const RunReport& report, const RunOptions& options, bool to_stderr) {
  std::string text;
  const auto line = [&](const std::string& s) { text += "assay run: " + s + "\n"; };
  if (!report.child.started) {
    line(fmt::format("cannot start {}: {}", options.command[0], std::strerror(report.child.start_errno)));
    return text;
  }
  if (report.child.signal != 0) line(fmt::format("the command was ended by signal {}", report.child.signal));
  for (const std::string& problem : report.problems) line(problem);
  if (to_stderr) return text;
  for (const std::string& probe : report.unseen) {
    line(OneLine(probe) + ": not found (no process came to its module)");
  }
  for (const std::string& folder : report.folders) line("trace " + folder);
  for (const ProcessSummary& p : report.processes) {
    line(fmt::format("  rank {} pid {}: {} events at {} sites, {}{}", p.rank, p.pid, p.events, p.sites,
                     DropsText(p.drops), p.closed ? "" : ", not closed (killed, or still running)"));
    uint64_t silent = 0, attached = 0;
    for (const CoverageNote& note : p.coverage) {
      attached += note.reason == "attached" ? 1 : 0;
      // Sites that never fired are many with a wide profile: counted. Probes, which have a kind in front, are named.
      const bool probe = note.site.find(':') != std::string::npos;
      if (report.SeenElsewhere(note)) continue;
      if (note.reason == "never fired" && !probe) ++silent;
      if (note.reason != "not found" && note.reason != "dropped" && note.reason != "failed" &&
          note.reason != "unwritten" && !(note.reason == "never fired" && probe)) {
        continue;
      }
      line(fmt::format("    {}: {}{}{}", OneLine(note.site), note.reason,
                       note.count != 0 ? fmt::format(" {}", note.count) : "",
                       note.detail.empty() ? "" : " (" + OneLine(note.detail) + ")"));
    }
    if (attached != 0) line(fmt::format("    attached at {} place(s)", attached));
    if (silent != 0) line(fmt::format("    {} site(s) never fired", silent));
  }
  if (report.events() != 0) return text;
  // Last, where it is seen: the exit code is the command's and says nothing of it.
  line(report.processes.empty()
           ? kNothingRecorded
           : "nothing was recorded: a recording was opened and no event came. What was chosen (--profile, --include, "
             "--layers, --steps) may leave out all that the command ran, or it never came to a "
             "site: --profile all tells");
  line("0 events. The exit code is the command's own; with --strict on it would be 1 in place of 0");
  return text;
}

// assay.run/1 of docs/json.md.
Json ToJson(const RunReport& report, const RunOptions& options, int exit_code) {
  Json processes = Json::array();
  for (const ProcessSummary& p : report.processes) {
    Json coverage = Json::array();
    for (const CoverageNote& n : p.coverage) {
      coverage.push_back({{"site", n.site}, {"reason", n.reason}, {"count", n.count}, {"detail", n.detail}});
    }
    processes.push_back({{"file", p.file},
                         {"rank", p.rank},
                         {"pid", p.pid},
                         {"events", p.events},
                         {"sites", p.sites},
                         {"dropped", p.drops.total()},
                         {"drops", DropsJson(p.drops)},
                         {"closed", p.closed},
                         {"coverage", coverage}});
  }
  return {{"schema", "assay.run/1"},
          {"version", ASSAY_VERSION},
          {"command", options.command},
          {"started", report.child.started},
          {"command_exit_code", report.child.signal == 0 ? Json(report.child.exit_code) : Json()},
          {"signal", report.child.signal == 0 ? Json() : Json(report.child.signal)},
          {"exit_code", exit_code},
          {"traces", report.folders},
          {"events", report.events()},
          {"dropped", report.dropped()},
          {"processes", processes},
          {"probes_unseen", report.unseen},
          {"problems", report.problems}};
}

// Closing counts: a full disk may only show then.
Status WriteReport(const std::string& file, const std::string& text) {
  if (file == "-") {
    std::fwrite(text.data(), 1, text.size(), stdout);
    return {};
  }
  std::FILE* out = std::fopen(file.c_str(), "w");
  const bool written = out != nullptr && std::fwrite(text.data(), 1, text.size(), out) == text.size();
  if (out == nullptr || std::fclose(out) != 0 || !written) {
    return Status::Environment(fmt::format("cannot write {}: {}", file, std::strerror(errno)));
  }
  return {};
}

// The command's own code wins; --strict can only turn a 0 into a 1.
Result<int> Run(const RunOptions& options) {
  ASSAY_ASSIGN_OR_RETURN(const Settings settings, SettingsForCommand(options.knobs));
  const bool to_stderr = settings.sink == "stderr";
  const std::set<std::string> before = to_stderr ? std::set<std::string>() : FilesBefore(settings.dir);

  RunReport report;
  ASSAY_ASSIGN_OR_RETURN(report.child, RunRecorded(settings, options.command, options.json_file == "-"));
  if (!to_stderr) {
    ReadTraces(settings.dir, before, &report);
    if (report.child.started) report.unseen = UnseenProbes(settings.probes, report);
  }

  int exit_code = report.child.shell_code();
  // What --strict does not let pass: a pattern without a match, something dropped, or nothing recorded at all.
  const bool lacking = report.Notes("not found") != 0 || !report.unseen.empty() || report.dropped() != 0 ||
                       report.Notes("dropped") != 0 || (!to_stderr && report.events() == 0);
  if (settings.strict && exit_code == 0 && lacking) exit_code = kExitDifference;
  if (!options.quiet || !report.child.started) {
    const std::string text = Printable(ToText(report, options, to_stderr), true);
    std::fwrite(text.data(), 1, text.size(), stderr);
  }
  if (!options.json_file.empty()) {
    ASSAY_RETURN_IF_ERROR(WriteReport(options.json_file, WriteJson(ToJson(report, options, exit_code)) + "\n"));
  }
  return exit_code;
}

}  // namespace

void AddRunCommand(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand("run", "Run a command with recording switched on, and say what was recorded");
  const auto options = std::make_shared<RunOptions>();
  for (const SettingHelp& help : AllSettings()) {
    const std::string variable(help.name);
    std::string text = fmt::format("{} [{}] ({})", help.help, help.default_value, help.name);
    if (variable == "ASSAY")
      text = "What to record, PROFILE[:SINK]: all, attn, mla, mlp, moe, io; sink stderr [all] (ASSAY)";
    if (variable == "ASSAY_DIR") text = fmt::format("{} [assay-trace-%i] (ASSAY_DIR)", help.help);
    command
        ->add_option_function<std::string>(
            OptionName(variable), [options, variable](const std::string& v) { options->knobs[variable] = v; }, text)
        ->type_name(std::string(help.grammar));
  }
  command
      ->add_option("--json", options->json_file,
                   "Write the report as JSON, schema assay.run/1; -: to stdout, and the command's stdout to stderr")
      ->type_name("FILE")
      ->check(CLI::Validator(
          [](const std::string& file) {
            // "assay run --json -- COMMAND" would take the two dashes for the file, and the command apart.
            return file == "--" ? "a file is expected, or - for stdout, found --" : std::string();
          },
          ""));
  command->add_flag("--quiet,-q", options->quiet, "No report on stderr");
  command->add_option("command", options->command, "The command and its arguments, behind --")
      ->required()
      ->type_name("-- COMMAND [ARGUMENT...]");
  command->footer(
      "The options are the variables ASSAY and ASSAY_* (docs/settings.md): they win over the environment, and the\n"
      "command sees them there. Programs that use the C interface or the Python package record by them.\n"
      "Examples:\n"
      "  assay run --profile mla --layers 0-3 -- ./my_engine --model m\n"
      "  assay run --profile io:stderr -- python generate.py\n"
      "Exit code: the command's own; 128 + N when signal N ended it; 127 not found, 126 not executable. Before the\n"
      "command starts, 2 and 4 have the meaning below. With --strict on, 1 in place of the command's 0 when a pattern\n"
      "matched no site, something was dropped or nothing was recorded.");
  command->callback([options, exit_code] {
    const Result<int> code = Run(*options);
    *exit_code = code.ok() ? *code : Fail("run", code.status());
  });
}

}  // namespace assay::cli
