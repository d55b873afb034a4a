// docs/json.md against what the commands print: every key printed is on the page, under its schema.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "cli/run_program.h"
#include "io/json.h"

namespace assay::testing {
namespace {

using Keys = std::set<std::string>;

// schema -> keys in backticks of its section's tables.
std::map<std::string, Keys> DocumentedKeys() {
  std::map<std::string, Keys> documented;
  std::ifstream in(ASSAY_SOURCE_DIR "/docs/json.md");
  static const std::regex kKey("`([a-z0-9_.\\[\\]*]+)`");
  std::string schema, line;
  while (std::getline(in, line)) {
    if (line.rfind("## ", 0) == 0) schema = line.substr(3);
    if (schema.empty() || line.rfind("| `", 0) != 0) continue;
    const std::string first_column = line.substr(0, line.find(" | "));
    for (std::sregex_iterator at(first_column.begin(), first_column.end(), kKey), end; at != end; ++at) {
      documented[schema].insert((*at)[1]);
    }
  }
  return documented;
}

// Paths of all leaves: "findings[].positions[][]". A null and an empty list count as a leaf of their own path.
void CollectKeys(const Json& value, const std::string& path, Keys* keys) {
  if (value.is_object()) {
    for (const auto& [key, child] : value.items()) CollectKeys(child, path.empty() ? key : path + "." + key, keys);
  } else if (value.is_array() && !value.empty()) {
    for (const Json& child : value) CollectKeys(child, path + "[]", keys);
  } else {
    keys->insert(path);
  }
}

bool Covers(const Keys& documented, const std::string& path) {
  if (documented.count(path) > 0 || path == "schema" || path == "version") return true;
  for (const std::string& key : documented) {
    // A list or object that is empty or null here: its members are documented.
    if (key.rfind(path + "[]", 0) == 0 || key.rfind(path + ".", 0) == 0) return true;
    if (key.ends_with(".*") && path.rfind(key.substr(0, key.size() - 1), 0) == 0) return true;
  }
  return false;
}

// first_bad and faulty.hand_patch repeat documented keys under another name; demo's diff is a document of its own.
std::string Canonical(std::string path) {
  if (path.rfind("first_bad.", 0) == 0) path.replace(0, 10, "findings[].");
  if (path.rfind("faulty.hand_patch.", 0) == 0) path.replace(0, 6, "healthy");
  return path;
}

void ExpectDocumented(const std::string& text, const std::string& schema) {
  const Result<Json> json = ParseJson(text, "stdout");
  ASSERT_TRUE(json.ok()) << json.status().message();
  EXPECT_EQ((*json)["schema"], schema);
  const auto documented = DocumentedKeys();
  ASSERT_TRUE(documented.count(schema) > 0) << "no section " << schema << " in docs/json.md";
  Keys keys;
  CollectKeys(*json, "", &keys);
  EXPECT_GE(keys.size(), 4u);
  for (const std::string& key : keys) {
    if (schema == "assay.demo/1" && key.rfind("diff.", 0) == 0) continue;
    EXPECT_TRUE(Covers(documented.at(schema), Canonical(key))) << schema << ": " << key << " is not in docs/json.md";
  }
}

// Two small traces with payloads, made once.
class JsonPage : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = (std::filesystem::temp_directory_path() / "assay-json-XXXXXX").string();
    ASSERT_NE(mkdtemp(folder_.data()), nullptr);
    const std::string model = ASSAY_SOURCE_DIR "/models/kjv-mla-10m";
    for (const auto& [name, fault] :
         {std::pair<std::string, std::string>{"a", "none:lse-base-2"}, {"b", "lse-base-2"}}) {
      const Output run = RunAssay({"reference", model, "--prompt", "And God said", "--max-tokens", "3", "--fault",
                                   fault, "--level", "payload", "--trace", folder_ + "/" + name, "--json"});
      ASSERT_EQ(run.exit_code, 0) << run.err;
      reference_ = run.out;
    }
  }
  static void TearDownTestSuite() { std::filesystem::remove_all(folder_); }

  static std::string folder_, reference_;
};
std::string JsonPage::folder_, JsonPage::reference_;

TEST_F(JsonPage, Reference) { ExpectDocumented(reference_, "assay.reference/1"); }
TEST_F(JsonPage, Diff) {
  const Output run = RunAssay({"diff", folder_ + "/a", folder_ + "/b", "--json"});
  EXPECT_EQ(run.exit_code, 1) << run.err;
  ExpectDocumented(run.out, "assay.diff/1");
}
TEST_F(JsonPage, Check) {
  const Output run = RunAssay({"check", folder_ + "/a", "--json"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  ExpectDocumented(run.out, "assay.check/1");
}
TEST_F(JsonPage, CheckList) {
  const Output run = RunAssay({"check", "--list", "--json"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  ExpectDocumented(run.out, "assay.checks/1");
}
TEST_F(JsonPage, Diagnose) {
  const Output one = RunAssay({"diagnose", folder_ + "/b", "--json"});
  EXPECT_EQ(one.exit_code, 1) << one.err;
  ExpectDocumented(one.out, "assay.diagnose/1");
  const Output two = RunAssay({"diagnose", folder_ + "/a", folder_ + "/b", "--json"});
  EXPECT_EQ(two.exit_code, 1) << two.err;
  ExpectDocumented(two.out, "assay.diagnose/1");
}
TEST_F(JsonPage, Show) {
  const Output run = RunAssay({"show", folder_ + "/a", "--json"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  ExpectDocumented(run.out, "assay.show/1");
}
TEST_F(JsonPage, Run) {
  const Output run = RunAssay({"run", "--json", "-", "--", "true"});
  ExpectDocumented(run.out, "assay.run/1");
}
TEST_F(JsonPage, Weights) {
  const Output run = RunAssay({"weights", ASSAY_SOURCE_DIR "/models/kjv-mla-10m", "--trace", folder_ + "/a", "--json"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  ExpectDocumented(run.out, "assay.weights/1");
}
TEST_F(JsonPage, Sites) { ExpectDocumented(RunAssay({"sites", "--json"}).out, "assay.sites/1"); }
TEST_F(JsonPage, Faults) { ExpectDocumented(RunAssay({"reference", "--list-faults", "--json"}).out, "assay.faults/1"); }
TEST_F(JsonPage, Doctor) { ExpectDocumented(RunAssay({"doctor", "--json"}).out, "assay.doctor/1"); }
TEST_F(JsonPage, Demo) { ExpectDocumented(RunAssay({"demo", "--max-tokens", "4", "--json"}).out, "assay.demo/1"); }

}  // namespace
}  // namespace assay::testing
