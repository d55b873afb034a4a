#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "cli/run_program.h"
#include "io/json.h"

namespace assay::testing {
namespace {

Json RunDemoJson(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "demo");
  arguments.emplace_back("--json");
  const Output run = RunAssay(arguments);
  EXPECT_EQ(run.exit_code, 0) << run.err << run.out;
  Result<Json> json = ParseJson(run.out, "stdout");
  EXPECT_TRUE(json.ok()) << json.status().message();
  return json.ok() ? *json : Json::object();
}

bool IsGarbage(const std::string& text, const std::string& word) {
  size_t count = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++count;
  return count >= 20;
}

// The story: garbage beside sense, six healthy figures, and the first wrong tensor with its row.
TEST(Demo, TellsTheStory) {
  const Json demo = RunDemoJson({});
  EXPECT_EQ(demo["schema"], "assay.demo/1");
  EXPECT_TRUE(demo["found"]);
  EXPECT_EQ(demo["planted"], "layers.0.attn.out");
  EXPECT_TRUE(IsGarbage(demo["faulty"]["text"], " he"));
  EXPECT_FALSE(IsGarbage(demo["healthy"]["text"], " he"));
  for (const char* side : {"healthy", "faulty"}) {
    const Json& patch = demo[side]["hand_patch"];
    EXPECT_TRUE(patch["healthy"]) << side;
    EXPECT_EQ(patch["phase"], "decode");
    std::vector<std::string> names;
    for (const Json& figure : patch["figures"]) names.push_back(figure["name"]);
    EXPECT_EQ(names, (std::vector<std::string>{"q", "k", "v", "kv_c_normed", "kv_b_proj", "has_context"}));
  }
  const Json& first = demo["diff"]["findings"][0];
  EXPECT_EQ(first["name"], "layers.0.attn.out");
  EXPECT_EQ(first["class"], "UNWRITTEN");
}

TEST(Demo, TextShowsEachPart) {
  const Output run = RunAssay({"demo"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  for (const char* part : {"1. What a user sees", "2. What a patch", "3. What assay says", "And God said unto Moses",
                           "kv_b_proj    [1792, 512]", "has_context  False", "Found: the same."}) {
    EXPECT_NE(run.out.find(part), std::string::npos) << part << "\n" << run.out;
  }
}

// What is printed follows from the options: another fault, layer and prompt, another first wrong tensor.
TEST(Demo, FaultLayerAndPromptAreFree) {
  const Json demo =
      RunDemoJson({"--prompt", "The LORD is my shepherd", "--fault", "mlp-gate-up-swapped", "--layer", "1"});
  EXPECT_EQ(demo["fault"], "mlp-gate-up-swapped@1");
  EXPECT_EQ(demo["prompt"], "The LORD is my shepherd");
  EXPECT_EQ(demo["diff"]["findings"][0]["name"], "layers.1.mlp.act");
}

TEST(Demo, FaultOfAnotherAttentionStillRuns) {
  const Json demo = RunDemoJson({"--fault", "k-norm-skipped"});
  EXPECT_EQ(demo["diff"]["findings"][0]["name"], "layers.0.attn.k");
  EXPECT_TRUE(demo["healthy"]["hand_patch"].contains("absent"));  // no latent in this variant
}

TEST(Demo, KeptTracesDiffTheSameWay) {
  std::string folder = (std::filesystem::temp_directory_path() / "assay-demo-test-XXXXXX").string();
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  EXPECT_EQ(RunAssay({"demo", "--keep", folder, "--max-tokens", "8"}).exit_code, 0);
  const Output diff = RunAssay({"diff", folder + "/healthy", folder + "/faulty"});
  EXPECT_EQ(diff.exit_code, 1) << diff.err;
  EXPECT_NE(diff.out.find("first wrong tensor: layers.0.attn.out"), std::string::npos) << diff.out;
  std::filesystem::remove_all(folder);
}

TEST(Demo, NothingIsLeftBehind) {
  std::string folder = (std::filesystem::temp_directory_path() / "assay-demo-tmp-XXXXXX").string();
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  EXPECT_EQ(RunAssay({"demo", "--max-tokens", "8"}, {"TMPDIR=" + folder}).exit_code, 0);
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  std::filesystem::remove_all(folder);
}

TEST(Demo, UnknownFaultNamesTheNearest) {
  const Output run = RunAssay({"demo", "--fault", "lse-base-3"});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_NE(run.err.find("lse-base-2"), std::string::npos) << run.err;
}

TEST(Demo, LayerThatDoesNotExistIsAUsageError) {
  EXPECT_EQ(RunAssay({"demo", "--layer", "4"}).exit_code, 2);
  EXPECT_EQ(RunAssay({"demo", "--layer", "-1"}).exit_code, 2);
}

TEST(Demo, MoreTokensThanTheModelHasPositionsIsAUsageError) {
  std::string prompt;
  for (int i = 0; i < 1500; ++i) prompt += "and the LORD ";
  const Output run = RunAssay({"demo", "--prompt", prompt, "--max-tokens", "1024"});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_EQ(run.out, "");
  EXPECT_NE(run.err.find("max_position_embeddings"), std::string::npos) << run.err;
}

TEST(Demo, BadTemporaryFolderIsNamed) {
  const Output run = RunAssay({"demo"}, {"TMPDIR=/nonexistent/tmp"});
  EXPECT_EQ(run.exit_code, 4);
  EXPECT_EQ(run.err,
            "assay demo: no folder for temporary files: TMPDIR=/nonexistent/tmp: No such file or directory; set it to "
            "one that exists\n");
}

TEST(Demo, ModelThatDoesNotExistIsBadInput) {
  const Output run = RunAssay({"demo", "--model", "/nonexistent/model"});
  EXPECT_EQ(run.exit_code, 3);
  EXPECT_NE(run.err.find("/nonexistent/model"), std::string::npos) << run.err;
}

}  // namespace
}  // namespace assay::testing
