// The command line: subcommands, the common footer of every --help, and the mapping of errors to exit codes.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/version.h"
#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "probe/settings.h"
#include "report/text_table.h"
#include "stats/measure.h"

namespace assay::cli {

int Fail(const char* command, const Status& status) {
  std::fprintf(stderr, "assay %s: %s\n", command, Printable(status.message(), true).c_str());
  return ExitCodeOf(status);
}

bool SayDamages(const char* command, const Trace& trace) {
  bool any = false;
  for (const std::vector<Damage>& damages : {trace.damages(), trace.payload_damages()}) {
    for (const Damage& d : damages) {
      if (d.benign) continue;
      any = true;
      std::fprintf(stderr, "assay %s: damaged: %s at byte %llu: %s\n", command, Printable(d.file, false).c_str(),
                   static_cast<unsigned long long>(d.offset), Printable(d.what, false).c_str());
    }
  }
  return any;
}

std::string WithoutEffect(const CLI::App& command, const std::string& option, const std::vector<std::string>& with) {
  for (const CLI::Option* given : command.get_options()) {
    const std::string name = given->get_positional() ? given->get_name(true) : given->get_name();
    if (given->count() == 0 || name == option || std::find(with.begin(), with.end(), name) != with.end()) continue;
    return name + " has no effect with " + option + ": leave one of them out";
  }
  return {};
}

namespace {

constexpr const char* kFooter =
    "Data goes to stdout, talk to stderr.\n"
    "Exit codes: 0 same or fine, 1 difference or fault found, 2 usage, 3 bad, damaged or\n"
    "incomparable input, 4 environment (disk, permission, library), 5 internal error.\n"
    "Environment: ASSAY=PROFILE[:SINK] and ASSAY_* choose what is recorded (docs/settings.md);\n"
    "ASSAY_ISA=portable|avx2|avx512 forces the kernels' instruction set.";

using AddCommand = void (*)(CLI::App&, int*);
// In the order in which --help lists them.
constexpr AddCommand kCommands[] = {AddDemoCommand,   AddReferenceCommand, AddRunCommand,      AddArmCommand,
                                    AddDisarmCommand, AddCheckCommand,     AddDiagnoseCommand, AddDiffCommand,
                                    AddShowCommand,   AddSitesCommand,     AddWeightsCommand,  AddDoctorCommand};

// One form of "TYPE [default] ... REQUIRED" under every version of CLI11: the help is an interface (tests/cli/golden).
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option_opts(const CLI::Option* option) const override {
    if (option->get_type_size() == 0) return {};  // a flag
    std::string text;
    if (!option->get_type_name().empty()) text += " " + option->get_type_name();
    if (!option->get_default_str().empty()) text += " [" + option->get_default_str() + "]";
    if (option->get_expected_max() == CLI::detail::expected_max_vector_size) text += " ...";
    if (option->get_required()) text += " REQUIRED";
    return text;
  }
};

// The parser's own conversion of numbers takes what does not fit to the nearest number that does, and -1 for an
// unsigned one to 2^64 - 1. Returns an error text, empty when the text is a whole number of 64 bits.
template <class Int>
std::string CheckWholeNumber(const std::string& text) {
  Int value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error == std::errc() && stop == end) return {};
  return "expected a whole number from " + std::to_string(std::numeric_limits<Int>::min()) + " to " +
         std::to_string(std::numeric_limits<Int>::max()) + ", found \"" + text + "\"";
}

// An option that is given must say something: an empty value is mostly a shell variable that was never set, and would
// be taken for "not given".
std::string CheckNotEmpty(const std::string& text) { return text.empty() ? "the value is empty" : ""; }

// "INT" and "INT:NONNEGATIVE" are INT, "INTERVALS" is not.
bool IsType(const std::string& type_name, const std::string& type) {
  return type_name == type || type_name.rfind(type + ":", 0) == 0 || type_name.rfind(type + " ", 0) == 0;
}

// What holds for every option of every command.
void CheckValues(CLI::App* command) {
  for (CLI::Option* option : command->get_options()) {
    if (option->get_type_size() == 0) continue;  // a flag
    const std::string type = option->get_type_name();
    if (IsType(type, "INT")) {
      option->check(CLI::Validator(CheckWholeNumber<int64_t>, ""));
    } else if (IsType(type, "UINT")) {
      option->check(CLI::Validator(CheckWholeNumber<uint64_t>, ""));
    } else if (!option->get_positional()) {
      option->check(CLI::Validator(CheckNotEmpty, ""));
    }
  }
}

// A forced instruction set that does not exist would be another one in silence.
void CheckInstructionSet() {
  const char* forced = std::getenv("ASSAY_ISA");
  const Status status = CheckIsaName(forced == nullptr ? "" : forced);
  if (!status.ok()) throw CLI::ValidationError(status.message());
}

// `diagnose -- COMMAND` runs the command, `diagnose TRACE` reads a trace: the parser drops the dashes, a flag stays.
std::vector<std::string> MarkCommand(std::vector<std::string> arguments) {
  const auto dashes = std::find(arguments.begin(), arguments.end(), "--");
  if (dashes != arguments.end() && arguments[0] == "diagnose") arguments.insert(dashes, "--live");
  return arguments;
}

// Those near to what was written, the nearest first, and the rest behind them in their order: "diff, demo, run, …".
std::string NearestFirst(std::string_view written, std::vector<std::string_view> names) {
  std::string text;
  while (!names.empty()) {
    const std::string_view nearest = NearestName(written, names);
    const auto next = nearest.empty() ? names.begin() : std::find(names.begin(), names.end(), nearest);
    text.append(text.empty() ? "" : ", ").append(*next);
    names.erase(next);
  }
  return text;
}

// Options that another command has, near in name to one that means something else here: said in so many words.
struct ForeignOption {
  const char *command, *option, *instead;
};
constexpr ForeignOption kForeignOptions[] = {
    {"reference", "--layer", "the layer of a fault stands behind its name: --fault NAME@LAYER, as lse-base-2@1"}};

// What to do about the first argument that nothing takes; the parser would only say that it was not expected.
// command: the app itself, or the subcommand that it stood behind.
std::string UnknownArgument(const CLI::App& command, const std::string& prefix, const std::string& argument) {
  if (argument.rfind('-', 0) == 0) {
    std::vector<std::string_view> options;
    for (const CLI::Option* option : command.get_options()) {
      for (const std::string& name : option->get_lnames()) options.push_back(name);
    }
    const std::string name = argument.substr(0, argument.find('='));
    for (const ForeignOption& foreign : kForeignOptions) {
      if (command.get_name() == foreign.command && name == foreign.option)
        return prefix + ": unknown option " + name + "; " + foreign.instead;
    }
    const std::string_view nearest = NearestName(name.substr(name.find_first_not_of('-') % name.size()), options);
    return prefix + ": unknown option " + name +
           (nearest.empty() ? "" : "; did you mean --" + std::string(nearest) + "?") + " (" + prefix +
           " --help lists them)";
  }
  if (command.get_parent() != nullptr) {
    return prefix + ": " + argument + " is one argument too many (" + prefix + " --help says what it takes)";
  }
  std::vector<std::string_view> commands;
  for (const CLI::App* one : command.get_subcommands([](const CLI::App*) { return true; })) {
    commands.push_back(one->get_name());
  }
  return prefix + ": unknown command " + argument + "; there are " + NearestFirst(argument, std::move(commands)) +
         " (assay --help says what each does)";
}

// As the user wrote them, of those that the app and the subcommand given have left over.
void SayUnknownArgument(const CLI::App& app, const std::vector<std::string>& written) {
  std::vector<const CLI::App*> levels = {&app};
  for (const CLI::App* command : app.get_subcommands()) levels.push_back(command);
  for (const CLI::App* level : levels) {
    const std::vector<std::string> left = level->remaining(false);
    const auto first = std::find_first_of(written.begin(), written.end(), left.begin(), left.end());
    if (first == written.end()) continue;
    const std::string prefix = level == &app ? "assay" : "assay " + level->get_name();
    std::fprintf(stderr, "%s\n", OneLine(UnknownArgument(*level, prefix, *first)).c_str());
    return;
  }
}

int Run(int argc, char** argv) {
  CLI::App app{"assay finds the first wrong tensor in a running LLM.", "assay"};
  app.formatter(std::make_shared<HelpFormatter>());  // before the commands, which take it over
  int exit_code = kExitOk;
  app.set_version_flag("--version", "assay " ASSAY_VERSION);
  app.footer(kFooter);
  for (const AddCommand add : kCommands) add(app, &exit_code);
  app.require_subcommand(0, 1);  // or the parser takes a trace called "reference" for the next command
  for (CLI::App* command : app.get_subcommands({})) {
    const std::string own = command->get_footer();
    command->footer(own.empty() ? kFooter : own + "\n\n" + kFooter);
    CheckValues(command);
    // doctor reports it among the rest.
    if (command->get_name() != "doctor") command->parse_complete_callback(CheckInstructionSet);
  }
  const std::vector<std::string> written(argv + std::min(argc, 1), argv + argc);
  try {
    std::vector<std::string> arguments = MarkCommand(written);
    std::reverse(arguments.begin(), arguments.end());  // as the parser wants them
    app.parse(std::move(arguments));
    // Not left to the parser, which would hide a misspelt command behind this.
    if (app.get_subcommands().empty()) throw CLI::RequiredError("A command");
  } catch (const CLI::ExtrasError&) {
    SayUnknownArgument(app, written);
    exit_code = kExitUsage;
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);  // prints help on stdout, errors on stderr
    exit_code = code == 0 ? kExitOk : kExitUsage;
  }
  // Output that did not arrive (full disk, closed pipe) is no success.
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    std::fprintf(stderr, "assay: cannot write to stdout\n");
    return kExitEnvironment;
  }
  return exit_code;
}

}  // namespace
}  // namespace assay::cli

int main(int argc, char** argv) {
  try {
    return assay::cli::Run(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "assay: out of memory\n");
    return assay::cli::kExitEnvironment;
  } catch (const std::system_error& error) {  // how the formatting library says that stdout takes no more
    std::fprintf(stderr, "assay: %s\n", error.what());
    return assay::cli::kExitEnvironment;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "assay: internal error: %s\n", error.what());
    return assay::cli::kExitInternal;
  }
}
