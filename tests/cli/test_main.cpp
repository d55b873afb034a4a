// The program as a whole: help texts, exit codes, usage errors, where output goes.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/version.h"
#include "cli/run_program.h"
#include "io/json.h"

namespace assay::testing {
namespace {

const std::vector<std::string> kCommands = {"demo", "reference", "run", "diff", "show", "sites", "doctor"};

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
  EXPECT_NE(run.err.find("divine"), std::string::npos) << run.err;
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
