// The program as a whole: help texts, exit codes, usage errors, where output goes.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "base/version.h"
#include "cli/run_program.h"
#include "io/json.h"

namespace assay::testing {
namespace {

const std::vector<std::string> kCommands = {"demo",     "reference", "run",  "arm",   "disarm",  "check",
                                            "diagnose", "diff",      "show", "sites", "weights", "doctor"};

TEST(Cli, HelpListsEveryCommand) {
  const Output run = RunAssay({"--help"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.out, Golden("help.txt", run.out));
  EXPECT_EQ(run.err, "");
  for (const std::string& command : kCommands) EXPECT_NE(run.out.find("  " + command + " "), std::string::npos);
}

class CommandHelp : public ::testing::TestWithParam<std::string> {};

// The golden text is the interface; the other expectations hold for every command whatever its golden says.
TEST_P(CommandHelp, HasExamplesExitCodesAndEnvironment) {
  const Output run = RunAssay({GetParam(), "--help"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.out, Golden("help-" + GetParam() + ".txt", run.out));
  for (const char* part : {"Example", "assay ", "Exit codes:", "Environment:"}) {
    EXPECT_NE(run.out.find(part), std::string::npos) << part;
  }
}

// doctor reports it (test_doctor.cpp); every other command would run on another instruction set in silence.
TEST_P(CommandHelp, UnknownInstructionSetIsAUsageError) {
  if (GetParam() == "doctor") return;
  const std::vector<std::string> some = {GetParam(), "x", "y"};
  const size_t positionals = GetParam() == "diff" ? 3 : GetParam() == "demo" || GetParam() == "sites" ? 1 : 2;
  const Output run = RunAssay({some.begin(), some.begin() + static_cast<ptrdiff_t>(positionals)}, {"ASSAY_ISA=avx3"});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_EQ(run.out, "");
  EXPECT_NE(run.err.find("ASSAY_ISA=avx3"), std::string::npos) << run.err;
  EXPECT_EQ(RunAssay({GetParam(), "--help"}, {"ASSAY_ISA=avx3"}).exit_code, 0);
}

TEST_P(CommandHelp, UnknownOptionIsAUsageError) {
  const Output run = RunAssay({GetParam(), "--no-such-option"});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_EQ(run.out, "");
  EXPECT_NE(run.err, "");
}

INSTANTIATE_TEST_SUITE_P(All, CommandHelp, ::testing::ValuesIn(kCommands),
                         [](const auto& tested) { return tested.param; });

TEST(Cli, VersionIsTheProjectsOne) {
  const Output run = RunAssay({"--version"});
  EXPECT_EQ(run.exit_code, 0);
  EXPECT_EQ(run.out, "assay " ASSAY_VERSION "\n");
}

TEST(Cli, NoCommandIsAUsageError) {
  const Output run = RunAssay({});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_EQ(run.out, "");
}

TEST(Cli, UnknownCommandIsAUsageError) {
  const Output run = RunAssay({"divine"});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_NE(run.err.find("unknown command divine; there are "), std::string::npos) << run.err;
  for (const std::string& command : kCommands) EXPECT_NE(run.err.find(command), std::string::npos) << run.err;
}

TEST(Cli, UnknownCommandListsTheNearestOnesFirst) {
  for (const auto& [written, nearest] : std::vector<std::pair<std::string, std::string>>{
           {"difff", "diff, "}, {"diagnos", "diagnose, "}, {"referense", "reference, "}}) {
    const Output run = RunAssay({written, "a", "b"});
    EXPECT_EQ(run.exit_code, 2);
    EXPECT_EQ(run.out, "");
    EXPECT_NE(run.err.find("unknown command " + written + "; there are " + nearest), std::string::npos) << run.err;
  }
}

TEST(Cli, UnknownOptionNamesTheNearestOne) {
  const Output run = RunAssay({"reference", "m", "--fualt=lse-base-2"});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_EQ(run.err,
            "assay reference: unknown option --fualt; did you mean --fault? (assay reference --help lists them)\n");
  EXPECT_NE(RunAssay({"--verbose", "diff", "a", "b"}).err.find("assay: unknown option --verbose"), std::string::npos);
  EXPECT_NE(RunAssay({"sites", "-"}).err, "");
}

TEST(Cli, ArgumentTooManyIsNamed) {
  const Output run = RunAssay({"diff", "a", "b", "c"});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_EQ(run.err, "assay diff: c is one argument too many (assay diff --help says what it takes)\n");
}

// The demo has --layer; here the layer belongs to the fault, and --layers means something else.
// A trace may be called what a command is called: wherever it stands, it is the trace.
TEST(Cli, TraceNamedLikeACommandIsATrace) {
  for (const std::string command : {"check", "diagnose", "show"}) {
    for (const std::string& name : kCommands) {
      const Output run = RunAssay({command, name});
      EXPECT_EQ(run.exit_code, 3) << command << " " << name;
      EXPECT_NE(run.err.find("assay " + command + ": " + name + ": no such trace"), std::string::npos) << run.err;
    }
  }
  const Output two = RunAssay({"diagnose", "reference", "show"});
  EXPECT_EQ(two.exit_code, 3);
  EXPECT_NE(two.err.find("assay diagnose: reference: no such trace"), std::string::npos) << two.err;
}

TEST(Cli, LayerOfAPlantedFaultStandsBehindItsName) {
  const Output run = RunAssay({"reference", "m", "--tokens", "5,6", "--fault", "lse-base-2", "--layer", "3"});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_NE(run.err.find("--fault NAME@LAYER"), std::string::npos) << run.err;
}

TEST(Cli, ValuesThatDoNotFitAreUsageErrorsInEveryCommand) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"show", "t", "--step", "99999999999999999999"},
        {"show", "t", "--site", ""},
        {"demo", "--layer", "99999999999999999999"},
        {"demo", "--layer", "-1"},
        {"diff", "a", "b", "--threads", "-1"},
        {"diff", "a", "b", "--tolerance", ""},
        {"run", "--json", "--", "true"}}) {
    const Output run = RunAssay(arguments);
    EXPECT_EQ(run.exit_code, 2) << arguments[0] << " " << run.err;
    EXPECT_EQ(run.out, "");
    EXPECT_NE(run.err, "");
    EXPECT_LT(run.err.size(), 300u) << run.err;
  }
}

// By name: who gave it believes that it did something.
TEST(Cli, OptionWithoutEffectIsAUsageErrorThatNamesIt) {
  const std::string model = ASSAY_SOURCE_DIR "/models/kjv-mla-10m";
  const auto reference = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"reference", model, "--tokens", "5,6", "--max-tokens", "1"});
    return more;
  };
  for (const auto& [option, arguments] : std::vector<std::pair<std::string, std::vector<std::string>>>{
           {"--wide", {"show", "t", "--wide", "--json"}},
           {"--all", {"diff", "a", "b", "--all", "--json"}},
           {"--all", {"weights", model, "--all", "--json"}},
           {"TRACE", {"check", "t", "--list"}},
           {"--only", {"check", "--list", "--only", "nonfinite"}},
           {"--max-tokens", {"reference", "--list-faults", "--max-tokens", "3"}},
           {"--echo", reference({"--echo", "--json"})},
           {"--seed", reference({"--seed", "3"})},
           {"--level", reference({"--level", "stats"})},
           {"--tokens-in-trace", reference({"--tokens-in-trace"})},
           {"--kv-scale", reference({"--kv-scale", "0.5", "--kv-dtype", "bf16"})}}) {
    const Output run = RunAssay(arguments);
    EXPECT_EQ(run.exit_code, 2) << option << " " << run.err;
    EXPECT_EQ(run.out, "") << option;
    EXPECT_NE(run.err.find(option), std::string::npos) << run.err;
  }
  EXPECT_EQ(RunAssay(reference({"--kv-scale", "0.5", "--kv-dtype", "fp8"})).exit_code, 0);
  EXPECT_EQ(RunAssay({"reference", "--list-faults", "--path", "absorbed", "--json"}).exit_code, 0);
}

TEST(Cli, FullStdoutIsAnEnvironmentErrorInEveryCommand) {
  if (access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full here";
  for (const char* command :
       {"sites", "doctor", "reference --list-faults", "reference --list-faults --json", "--help"}) {
    const std::string line = std::string(ASSAY_BINARY_DIR) + "/assay " + command + " >/dev/full 2>/dev/null";
    const int status = std::system(line.c_str());
    EXPECT_EQ(WEXITSTATUS(status), 4) << command;
  }
}

TEST(Cli, LoopOfLinksIsBadInputInEveryCommand) {
  std::string folder = (std::filesystem::temp_directory_path() / "assay-loop-XXXXXX").string();
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  std::filesystem::create_symlink("loop", folder + "/loop");
  const std::string loop = folder + "/loop";
  for (const std::vector<std::string>& arguments : {std::vector<std::string>{"show", loop},
                                                    {"diff", loop, loop},
                                                    {"check", loop},
                                                    {"diagnose", loop},
                                                    {"weights", loop},
                                                    {"weights", loop + "/x"},
                                                    {"reference", loop, "--tokens", "1"},
                                                    {"demo", "--model", loop},
                                                    {"arm", loop}}) {
    const Output run = RunAssay(arguments);
    EXPECT_EQ(run.exit_code, 3) << arguments[0] << " " << run.err;
    EXPECT_NE(run.err.find(loop), std::string::npos) << run.err;
  }
  std::filesystem::remove_all(folder);
}

TEST(Cli, TraceThatDoesNotExistIsBadInput) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"show", "/nonexistent/trace"}, {"diff", "/nonexistent/a", "/nonexistent/b"}}) {
    const Output run = RunAssay(arguments);
    EXPECT_EQ(run.exit_code, 3) << arguments[0];
    EXPECT_EQ(run.out, "");
    EXPECT_NE(run.err.find("/nonexistent/"), std::string::npos) << run.err;
  }
}

}  // namespace
}  // namespace assay::testing
