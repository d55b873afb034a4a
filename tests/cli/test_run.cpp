#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "cli/run_program.h"
#include "io/json.h"

namespace assay::testing {
namespace {

namespace fs = std::filesystem;

class RunCommand : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/assay-run-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    folder_ = name;
  }
  void TearDown() override { fs::remove_all(folder_); }
  Output Run(std::vector<std::string> arguments, const std::vector<std::string>& environment = {}) {
    arguments.insert(arguments.begin(), "run");
    return RunAssay(arguments, environment, folder_);
  }
  Json ReadJson(const std::string& file) {
    std::ifstream in(folder_ + "/" + file);
    const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    Result<Json> json = ParseJson(text, file);
    EXPECT_TRUE(json.ok()) << json.status().message();
    return json.ok() ? *json : Json();
  }
  std::string folder_;
  const std::string host_ = ASSAY_BINARY_DIR "/tests/runtime/example_host";
};

TEST_F(RunCommand, HostRecordsAndTheReportCounts) {
  const Output run = Run({"--json", "report.json", "--", host_});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.out, "");
  EXPECT_NE(run.err.find("3 events at 1 sites, 0 dropped\n"), std::string::npos) << run.err;
  const Json report = ReadJson("report.json");
  EXPECT_EQ(report["schema"], "assay.run/1");
  EXPECT_EQ(report["events"], 3);
  ASSERT_EQ(report["processes"].size(), 1u);
  EXPECT_TRUE(report["processes"][0]["closed"]);
  EXPECT_EQ(report["traces"][0], folder_ + "/assay-trace-0");
  // A second run takes the next folder.
  EXPECT_EQ(Run({"-q", "--", host_}).err, "");
  EXPECT_TRUE(fs::exists(folder_ + "/assay-trace-1"));
}

TEST_F(RunCommand, OnlyThisRunsProcessesAreReported) {
  for (int i = 0; i < 2; ++i) {
    const Output run = Run({"--dir", "t", "--json", "r.json", "--", host_});
    ASSERT_EQ(run.exit_code, 0) << run.err;
    EXPECT_EQ(ReadJson("r.json")["processes"].size(), 1u);
  }
}

TEST_F(RunCommand, OptionsWinOverTheEnvironmentAndReachTheCommand) {
  const Output run = Run({"--level", "names", "--", "sh", "-c", "echo $ASSAY $ASSAY_LEVEL $ASSAY_LAYERS"},
                         {"ASSAY=mla", "ASSAY_LEVEL=payload", "ASSAY_LAYERS=1"});
  EXPECT_EQ(run.out, "mla names 1\n");
  EXPECT_EQ(run.exit_code, 0);
  EXPECT_NE(run.err.find("nothing was recorded"), std::string::npos);
}

// The host's exit status stays; the last lines say that there is nothing, and what to do.
TEST_F(RunCommand, NothingRecordedIsSaidLast) {
  const std::string last =
      "assay run: 0 events. The exit code is the command's own; with --strict on it would be 1 in place of 0\n";
  // Without a recording, and with one that lets no site through.
  for (const std::vector<std::string>& command : {std::vector<std::string>{"--json", "r.json", "--", "true"},
                                                  {"--include", "logits", "--json", "r.json", "--", host_}}) {
    const Output run = Run(command);
    EXPECT_EQ(run.exit_code, 0) << run.err;
    EXPECT_TRUE(run.err.ends_with(last)) << run.err;
    EXPECT_NE(run.err.find("assay run: nothing was recorded: "), std::string::npos) << run.err;
    EXPECT_EQ(ReadJson("r.json")["events"], 0);
  }
  EXPECT_EQ(Run({"-q", "--", "true"}).err, "");
  EXPECT_EQ(Run({"--", host_}).err.find("nothing was recorded"), std::string::npos);
}

TEST_F(RunCommand, ExitCodesOfTheCommandPass) {
  EXPECT_EQ(Run({"--", "sh", "-c", "exit 42"}).exit_code, 42);
  EXPECT_EQ(Run({"--", "sh", "-c", "kill -TERM $$"}).exit_code, 128 + 15);
  const Output missing = Run({"--", "./no-such-program"});
  EXPECT_EQ(missing.exit_code, 127);
  EXPECT_EQ(missing.err, "assay run: cannot start ./no-such-program: No such file or directory\n");
  EXPECT_EQ(Run({"--", folder_}).exit_code, 126);
}

TEST_F(RunCommand, WrongSettingsEndBeforeTheCommandStarts) {
  const Output run = Run({"--layers", "3-x", "--", "touch", "ran"});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_NE(run.err.find("ASSAY_LAYERS, column 3"), std::string::npos) << run.err;
  EXPECT_FALSE(fs::exists(folder_ + "/ran"));
  EXPECT_EQ(Run({"--", "true"}, {"ASSAY_LEVLE=x"}).exit_code, 2);
  EXPECT_EQ(Run({}).exit_code, 2);
}

TEST_F(RunCommand, FolderThatCannotBeMadeEndsBeforeTheCommandStarts) {
  fs::create_symlink("loop", folder_ + "/loop");
  fs::create_symlink("nowhere", folder_ + "/dangling");
  std::ofstream(folder_ + "/file") << "x";
  for (const char* dir : {"/proc/x", "file", "file/below", "loop", "loop/below", "dangling"}) {
    const Output run = Run({"--dir", dir, "--", "touch", "ran"});
    EXPECT_EQ(run.exit_code, 4) << dir << ": " << run.err;
    EXPECT_NE(run.err.find("no trace can be written to"), std::string::npos) << run.err;
    EXPECT_FALSE(fs::exists(folder_ + "/ran")) << dir;
  }
  EXPECT_EQ(Run({"--dir", "a/b/%r-%p", "--", host_}).exit_code, 0);
}

TEST_F(RunCommand, StrictIsOneWhenAPatternMatchedNothing) {
  const Output run = Run({"--strict", "on", "--include", "logits,layers.*", "--", host_});
  EXPECT_EQ(run.exit_code, 2);  // the host passes assay_close's code on: the library is strict too
  EXPECT_NE(run.err.find("logits: not found"), std::string::npos) << run.err;
  EXPECT_EQ(Run({"--strict", "on", "--", "true"}).exit_code, 1);
  EXPECT_EQ(Run({"--strict", "on", "--", host_}).exit_code, 0);
}

// A process attaches when it comes to a probe's module: this one comes to none, and writes no note.
TEST_F(RunCommand, ProbeThatNoProcessCameToIsNotFound) {
  const std::vector<std::string> probes = {"--probes", "call:no_such_pkg.mod:f,local:other.g:k", "--json", "r.json"};
  for (const std::vector<std::string>& command : {std::vector<std::string>{"true"}, {host_}}) {
    std::vector<std::string> arguments = probes;
    arguments.emplace_back("--");
    arguments.insert(arguments.end(), command.begin(), command.end());
    const Output run = Run(arguments);
    EXPECT_EQ(run.exit_code, 0) << run.err;
    EXPECT_NE(run.err.find("call:no_such_pkg.mod:f: not found"), std::string::npos) << run.err;
    EXPECT_EQ(ReadJson("r.json")["probes_unseen"], Json({"call:no_such_pkg.mod:f", "local:other.g:k"}));
    arguments.insert(arguments.begin(), {"--strict", "on"});
    EXPECT_EQ(Run(arguments).exit_code, 1);
  }
}

TEST_F(RunCommand, ReportOnStdoutIsAloneThere) {
  const Output run = Run({"--json", "-", "--", "sh", "-c", "echo of the command"});
  EXPECT_EQ(run.exit_code, 0);
  const Result<Json> report = ParseJson(run.out, "stdout");
  ASSERT_TRUE(report.ok()) << run.out;
  EXPECT_EQ((*report)["schema"], "assay.run/1");
  EXPECT_NE(run.err.find("of the command\n"), std::string::npos) << run.err;
}

TEST_F(RunCommand, DropsHaveTheirReasons) {
  const Output run = Run({"--level", "payload", "--budget", "payload=1B", "--json", "r.json", "--", host_});
  const Json report = ReadJson("r.json");
  ASSERT_GT(report["dropped"], 0) << run.err;
  EXPECT_EQ(report["processes"][0]["drops"]["payload_budget"], report["dropped"]);
  EXPECT_NE(run.err.find("dropped (payload_budget "), std::string::npos) << run.err;
}

TEST_F(RunCommand, RankAndPidInTheFolderNameAreFound) {
  const Output run = Run({"--dir", "t-%r-%p", "--json", "r.json", "--", host_}, {"RANK=3"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const Json report = ReadJson("r.json");
  ASSERT_EQ(report["traces"].size(), 1u);
  EXPECT_EQ(report["traces"][0].get<std::string>().find(folder_ + "/t-3-"), 0u);
  EXPECT_EQ(report["processes"][0]["rank"], 3);
}

}  // namespace
}  // namespace assay::testing
