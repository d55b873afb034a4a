// `assay diagnose` as a user runs it: on the traces of the demo, and on a command with and without a fault.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "cli/run_program.h"
#include "io/json.h"

namespace assay::testing {
namespace {

namespace fs = std::filesystem;

class DiagnoseCommand : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = (fs::temp_directory_path() / "assay-diagnose-XXXXXX").string();
    ASSERT_NE(::mkdtemp(folder_.data()), nullptr);
  }
  void TearDown() override { fs::remove_all(folder_); }

  // Fails the test unless it exits so and prints assay.diagnose/1.
  Json Diagnose(std::vector<std::string> arguments, int exit_code) const {
    arguments.insert(arguments.begin(), {"diagnose", "--json"});
    const Output run = RunAssay(arguments, {}, folder_);
    EXPECT_EQ(run.exit_code, exit_code) << run.err;
    const Result<Json> json = ParseJson(run.out, "stdout");
    EXPECT_TRUE(json.ok()) << run.out << run.err;
    return json.ok() ? *json : Json::object();
  }

  std::string folder_;
};

std::vector<std::string> Hypotheses(const Json& entries) {
  std::vector<std::string> names;
  for (const Json& entry : entries) names.push_back(entry["hypothesis"]);
  return names;
}

bool HasNumber(const Json& evidence) {
  const std::string text = evidence.dump();
  return std::any_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
}

// First cells of the page's table rows below `heading`, several names in a cell taken apart, without backticks.
std::set<std::string> FirstCells(const std::string& page, const std::string& heading) {
  std::ifstream in(ASSAY_SOURCE_DIR "/docs/" + page);
  std::set<std::string> cells;
  bool below = false;
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("## ", 0) == 0) below = line == "## " + heading;
    if (!below || line.rfind("| ", 0) != 0) continue;
    std::string cell = line.substr(2, line.find(" |", 2) - 2);
    cell.erase(std::remove(cell.begin(), cell.end(), '`'), cell.end());
    std::replace(cell.begin(), cell.end(), ',', '\n');
    std::istringstream names(cell);
    for (std::string name; std::getline(names, name);) cells.insert(name.substr(name.find_first_not_of(' ')));
  }
  return cells;
}

// Where the budget left most events without values, each of them is one that could not be judged.
TEST_F(DiagnoseCommand, WhatHasNoValuesIsCountedInTheVerdictAndInWhatIsRuledOut) {
  const auto record = [&](const std::string& trace, const std::vector<std::string>& environment) {
    return RunAssay({"reference", ASSAY_SOURCE_DIR "/models/kjv-mla-10m", "--prompt", "And God said", "--max-tokens",
                     "2", "--trace", folder_ + "/" + trace, "--level", "payload"},
                    environment, folder_);
  };
  ASSERT_EQ(record("all", {}).exit_code, 0);
  ASSERT_EQ(record("some", {"ASSAY_BUDGET=payload=200KiB"}).exit_code, 0);
  const auto norms = [](const Json& diagnosis) {
    for (const Json& entry : diagnosis["ruled_out"]) {
      if (entry["hypothesis"] == "norm") return entry;
    }
    return Json({{"judged", 0}, {"not_judged", 0}});
  };
  const Json all = norms(Diagnose({"all"}, 0)), partly = Diagnose({"some"}, 0), some = norms(partly);
  EXPECT_EQ(all["not_judged"], 0);
  ASSERT_GT(some["judged"], 0);
  EXPECT_LT(some["judged"], all["judged"]);
  EXPECT_EQ(some["judged"].get<int>() + some["not_judged"].get<int>(), all["judged"].get<int>());

  const std::string text = RunAssay({"diagnose", "some"}, {}, folder_).out;
  const auto number = [](const Json& n) { return std::to_string(n.get<int>()); };
  EXPECT_NE(text.find("ruled out in " + number(some["judged"]) + " of " + number(all["judged"])), std::string::npos)
      << text;
  const Json& c = partly["coverage"];
  EXPECT_TRUE(text.ends_with("\nverdict: no fault found in what was recorded; " + number(c["payloads"]) + " of " +
                             number(c["events"]) + " events have values\n"))
      << text;
  EXPECT_TRUE(RunAssay({"diagnose", "all"}, {}, folder_).out.ends_with("no fault found in what was recorded\n"));
}

// The planted fault alone is confirmed; everything else that the traces can tell is ruled out, with numbers.
TEST_F(DiagnoseCommand, OnTheStoryTheOutputBufferAloneIsConfirmed) {
  const Output demo = RunAssay({"demo", "--keep", folder_});
  ASSERT_EQ(demo.exit_code, 0) << demo.err;
  const Json faulty = Diagnose({"faulty"}, 1);
  EXPECT_EQ(Hypotheses(faulty["confirmed"]), std::vector<std::string>{"output buffer"}) << faulty["confirmed"].dump(1);
  EXPECT_EQ(faulty["findings"][0]["first_bad"]["name"], "layers.0.attn.out");
  EXPECT_EQ(faulty["findings"][0]["first_bad"]["class"], "UNWRITTEN");
  EXPECT_GE(faulty["ruled_out"].size(), 10u) << faulty["not_testable"].dump(1);
  for (const Json& entry : faulty["ruled_out"]) EXPECT_TRUE(HasNumber(entry["evidence"])) << entry.dump();

  const Json healthy = Diagnose({"healthy"}, 0);
  EXPECT_EQ(healthy["confirmed"].size(), 0u) << healthy["confirmed"].dump(1);
  EXPECT_GE(healthy["ruled_out"].size(), 11u);
  const std::vector<std::string> ruled_out = Hypotheses(healthy["ruled_out"]);
  EXPECT_NE(std::find(ruled_out.begin(), ruled_out.end(), "output buffer"), ruled_out.end());
}

// Nothing but the command is given: diagnose records it and names what is wrong in it.
TEST_F(DiagnoseCommand, ALiveCommandWithAFaultIsNamedAndARightOneIsNot) {
  const std::string program = ASSAY_BINARY_DIR "/assay", model = ASSAY_SOURCE_DIR "/models/kjv-mla-10m";
  const std::vector<std::string> command{"--",       program,        "reference",    model,
                                         "--prompt", "And God said", "--max-tokens", "3"};
  std::vector<std::string> faulty = command;
  faulty.insert(faulty.end(), {"--fault", "lse-base-2@1"});
  const Json wrong = Diagnose(faulty, 1);
  EXPECT_EQ(wrong["findings"][0]["first_bad"]["name"], "layers.1.attn.chunk.0.lse");
  EXPECT_EQ(wrong["findings"][0]["first_bad"]["class"], "LSE");
  EXPECT_EQ(Hypotheses(wrong["confirmed"]), std::vector<std::string>{"chunked prefill and merge"});

  const Json right = Diagnose(command, 0);
  EXPECT_EQ(right["findings"].size(), 0u);
  EXPECT_GE(right["ruled_out"].size(), 10u);
}

// The pages name all that the program has, and nothing else.
TEST_F(DiagnoseCommand, ThePagesNameEveryRungOfTheLadderAndEveryCheck) {
  const Output run = RunAssay({"reference", ASSAY_SOURCE_DIR "/models/kjv-mla-10m", "--prompt", "And", "--max-tokens",
                               "1", "--trace", folder_ + "/t"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const Json diagnosis = Diagnose({"t"}, 0);
  std::set<std::string> rungs;
  for (const char* state : {"confirmed", "ruled_out", "not_testable"}) {
    for (const std::string& name : Hypotheses(diagnosis[state])) EXPECT_TRUE(rungs.insert(name).second) << name;
  }
  std::set<std::string> ladder = FirstCells("diagnose.md", "The ladder");
  ladder.erase("hypothesis");
  EXPECT_EQ(ladder, rungs);

  const Result<Json> listed = ParseJson(RunAssay({"check", "--list", "--json"}).out, "stdout");
  ASSERT_TRUE(listed.ok());
  std::set<std::string> checks;
  for (const Json& check : (*listed)["checks"]) checks.insert(check["name"].get<std::string>());
  std::set<std::string> described;
  for (const char* heading : {"Statistics suffice", "Values", "Operations"})
    described.merge(FirstCells("checks.md", heading));
  described.erase("check");
  EXPECT_EQ(described, checks);
}

}  // namespace
}  // namespace assay::testing
