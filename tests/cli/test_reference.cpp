#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "cli/run_program.h"
#include "io/json.h"
#include "trace/trace_bytes.h"

namespace assay::testing {
namespace {

const std::string kModel = std::string(ASSAY_SOURCE_DIR) + "/models/kjv-mla-10m";
const std::string kPrompt = "In the beginning God created the heaven and the earth";

Output Reference(std::vector<std::string> arguments, const std::vector<std::string>& environment = {}) {
  arguments.insert(arguments.begin(), {"reference", kModel});
  return RunAssay(arguments, environment);
}

Json Parse(const Output& run) {
  EXPECT_EQ(run.exit_code, 0) << run.err;
  Result<Json> json = ParseJson(run.out, "stdout");
  EXPECT_TRUE(json.ok()) << json.status().message() << "\n" << run.out;
  return json.ok() ? *json : Json();
}

class ReferenceCommand : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "assay-reference-XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string Folder(const std::string& name) const { return folder_ + "/" + name; }

 private:
  std::string folder_;
};

TEST_F(ReferenceCommand, TextIsTheSameOnBothPaths) {
  const Output a = Reference({"--prompt", kPrompt, "--max-tokens", "12", "--ignore-eos"});
  const Output b = Reference({"--prompt", kPrompt, "--max-tokens", "12", "--ignore-eos", "--path", "absorbed"});
  EXPECT_EQ(a.exit_code, 0) << a.err;
  EXPECT_GT(a.out.size(), 20u);
  EXPECT_EQ(a.out, b.out);
  EXPECT_NE(a.err.find("ms a token"), std::string::npos);
}

TEST_F(ReferenceCommand, JsonHoldsRunRequestsAndFigures) {
  const Json json = Parse(Reference(
      {"--prompt", kPrompt, "--tokens", "5,6 7", "--max-tokens", "3", "--ignore-eos", "--json", "--shards", "2"}));
  EXPECT_EQ(json["schema"], "assay.reference/1");
  EXPECT_EQ(json["run"]["shards"], "2");
  EXPECT_EQ(json["run"]["model"], "kjv-mla-10m");
  ASSERT_EQ(json["requests"].size(), 2u);
  EXPECT_EQ(json["requests"][0]["prompt"], kPrompt);
  EXPECT_EQ(json["requests"][1]["prompt_tokens"], Json({5, 6, 7}));
  EXPECT_EQ(json["requests"][1]["tokens"].size(), 3u);
  EXPECT_FALSE(json["requests"][1]["text"].get<std::string>().empty());
  EXPECT_EQ(json["stats"]["decode_tokens"], 4);
}

TEST_F(ReferenceCommand, FaultListIsCompleteJson) {
  const Json json = Parse(Reference({"--list-faults", "--json"}));
  EXPECT_EQ(json["schema"], "assay.faults/1");
  EXPECT_GE(json["faults"].size(), 25u);
  for (const Json& fault : json["faults"]) {
    for (const char* key : {"name", "class", "first_bad"}) EXPECT_FALSE(fault[key].get<std::string>().empty());
    EXPECT_TRUE(fault["needs"].is_array());
  }
  EXPECT_EQ(RunAssay({"reference", "--list-faults"}).exit_code, 0);  // needs no model
}

TEST_F(ReferenceCommand, LikeFollowsTheTokensOfAnotherRun) {
  const std::string trace = Folder("sampled");
  const Json sampled = Parse(Reference({"--prompt", kPrompt, "--max-tokens", "8", "--temperature", "1.5", "--seed", "4",
                                        "--ignore-eos", "--trace", trace, "--tokens-in-trace", "--json"}));
  const Json greedy = Parse(Reference({"--prompt", kPrompt, "--max-tokens", "8", "--ignore-eos", "--json"}));
  ASSERT_NE(sampled["requests"][0]["tokens"], greedy["requests"][0]["tokens"]);
  const Json followed = Parse(Reference({"--prompt", kPrompt, "--max-tokens", "8", "--like", trace, "--json"}));
  EXPECT_EQ(followed["requests"][0]["tokens"], sampled["requests"][0]["tokens"]);
  const Json without_prompt = Parse(Reference({"--max-tokens", "8", "--like", trace, "--json"}));
  EXPECT_EQ(without_prompt["requests"][0]["tokens"], sampled["requests"][0]["tokens"]);
}

TEST_F(ReferenceCommand, LikeWithoutStoredTokensSaysHowToStoreThem) {
  const std::string trace = Folder("plain");
  ASSERT_EQ(Reference({"--prompt", kPrompt, "--max-tokens", "2", "--trace", trace}).exit_code, 0);
  const Output run = Reference({"--prompt", kPrompt, "--like", trace});
  EXPECT_EQ(run.exit_code, 3);
  EXPECT_NE(run.err.find("--tokens-in-trace"), std::string::npos) << run.err;
  EXPECT_EQ(Reference({"--prompt", kPrompt, "--like", Folder("absent")}).exit_code, 3);
}

TEST_F(ReferenceCommand, LayersTakeTheirInputFromAPayload) {
  const std::string trace = Folder("payload");
  const Json whole =
      Parse(Reference({"--prompt", kPrompt, "--max-tokens", "1", "--trace", trace, "--level", "payload", "--json"}));
  const Json rest =
      Parse(Reference({"--prompt", kPrompt, "--max-tokens", "1", "--layers", "2:", "--input", trace, "--json"}));
  EXPECT_EQ(whole["requests"][0]["tokens"], rest["requests"][0]["tokens"]);
  EXPECT_EQ(Reference({"--prompt", kPrompt, "--layers", "2:4"}).exit_code, 2);
  EXPECT_EQ(Reference({"--prompt", "Another prompt", "--layers", "2:4", "--input", trace}).exit_code, 3);
}

TEST_F(ReferenceCommand, DefaultTraceHoldsNoTokenIds) {
  const std::string trace = Folder("private");
  ASSERT_EQ(Reference({"--prompt", kPrompt, "--max-tokens", "2", "--trace", trace}).exit_code, 0);
  EXPECT_FALSE(std::filesystem::exists(trace + "/payloads"));
  EXPECT_EQ(Reference({"--like", trace}).exit_code, 3);
}

TEST_F(ReferenceCommand, ErrorsHaveTheRightExitCode) {
  EXPECT_EQ(RunAssay({"reference"}).exit_code, 2);
  EXPECT_EQ(Reference({}).exit_code, 2);  // no prompt
  EXPECT_EQ(Reference({"--tokens", "1,x"}).exit_code, 2);
  EXPECT_EQ(Reference({"--tokens", "99999"}).exit_code, 2);
  EXPECT_EQ(Reference({"--prompt", kPrompt, "--path", "sideways"}).exit_code, 2);
  EXPECT_EQ(Reference({"--prompt", kPrompt, "--layers", "1-2"}).exit_code, 2);
  EXPECT_EQ(Reference({"--prompt", kPrompt, "--batch", "--sequential"}).exit_code, 2);
  EXPECT_EQ(Reference({"--prompt", kPrompt, "--fault", "no-such-fault"}).exit_code, 2);
  EXPECT_EQ(Reference({"--tokens", "5,6", "--fault", "window-off-by-one", "--max-tokens", "2"}).exit_code, 2);
  EXPECT_EQ(Reference({"--prompt", kPrompt}, {"ASSAY_LEVLE=stats"}).exit_code, 2);
  EXPECT_EQ(RunAssay({"reference", Folder("nothing"), "--tokens", "1"}).exit_code, 3);
  EXPECT_EQ(Reference({"--prompt", kPrompt, "--trace", "/proc/no/such/folder"}).exit_code, 4);
}

TEST_F(ReferenceCommand, ValuesThatDoNotFitAreRefusedNeverCut) {
  const std::vector<std::vector<std::string>> wrong = {
      {"--max-tokens", "100000000000000000000"},
      {"--max-tokens", "2046"},  // one position more than the model has
      {"--max-tokens", "9223372036854775807"},
      {"--max-tokens", "1.5"},
      {"--max-tokens", ""},
      {"--seed", "-1"},
      {"--seed", "18446744073709551616"},
      {"--shards", "99999999999999999999"},
      {"--temperature", "inf"},
      {"--temperature", "nan"},
      {"--layers", ""},
      {"--fault", ""},
      {"--trace", ""},
      {"--like", ""},
      {"--input", Folder("x")},  // without --layers A:B
  };
  for (const std::vector<std::string>& option : wrong) {
    const Output run = Reference({"--tokens", "1,2,3,4", option[0], option[1]});
    EXPECT_EQ(run.exit_code, 2) << option[0] << " " << option[1] << "\n" << run.err;
    EXPECT_EQ(run.out, "");
    EXPECT_EQ(run.err.find("e+308"), std::string::npos) << run.err;
  }
  for (const char* ids : {"", ",", ",1", "1,", "1,,2", "1;2", "1.5", "-1", "+1", "0x10", "99999999999999999999"}) {
    EXPECT_EQ(Reference({"--tokens", ids, "--max-tokens", "1"}).exit_code, 2) << "--tokens '" << ids << "'";
  }
  for (const char* ids : {"1", " 1", "1 ", "1,2", "1 2", "1 , 2", " 1,  2 "}) {
    EXPECT_EQ(Reference({"--tokens", ids, "--max-tokens", "1"}).exit_code, 0) << "--tokens '" << ids << "'";
  }
}

TEST_F(ReferenceCommand, FaultThatChangesNothingLeavesNoTrace) {
  const std::vector<std::string> arguments = {"--tokens",     "5,6", "--fault", "window-off-by-one",
                                              "--max-tokens", "2",   "--trace", Folder("trace")};
  const Output run = Reference(arguments);
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_NE(run.err.find("changed nothing"), std::string::npos) << run.err;
  EXPECT_FALSE(std::filesystem::exists(Folder("trace")));

  // What others recorded there stays.
  ASSERT_EQ(Reference({"--tokens", "5,6", "--max-tokens", "1", "--trace", Folder("trace")}).exit_code, 0);
  const auto files = [&] {
    const std::filesystem::directory_iterator folder(Folder("trace"));
    return std::distance(begin(folder), end(folder));
  };
  const auto before = files();
  EXPECT_EQ(Reference(arguments).exit_code, 2);
  EXPECT_EQ(files(), before);
  EXPECT_EQ(RunAssay({"show", Folder("trace")}).exit_code, 0);
}

TEST_F(ReferenceCommand, SecondRunIntoOneFolderIsSaid) {
  const std::vector<std::string> arguments = {"--tokens", "5,6", "--max-tokens", "1", "--trace", Folder("trace")};
  EXPECT_EQ(Reference(arguments).err.find("another recording"), std::string::npos);
  EXPECT_NE(Reference(arguments).err.find("another recording"), std::string::npos);
}

TEST_F(ReferenceCommand, DamagedTraceIsComparedButNeverCalledFine) {
  for (const char* name : {"a", "b"}) {
    ASSERT_EQ(Reference({"--tokens", "5,6", "--max-tokens", "2", "--trace", Folder(name)}).exit_code, 0);
  }
  EXPECT_EQ(RunAssay({"diff", Folder("a"), Folder("b")}).exit_code, 0);
  std::string file;
  for (const auto& entry : std::filesystem::directory_iterator(Folder("b"))) {
    if (entry.path().extension() == ".assay") file = entry.path();
  }
  Bytes bytes = ReadBytes(file);
  std::vector<RecordSpan> events;
  for (const RecordSpan& record : RecordsOf(bytes)) {
    if (record.kind == format::kKindEvent) events.push_back(record);
  }
  ASSERT_GT(events.size(), 100u);
  const RecordSpan& victim = events[events.size() / 2];
  bytes[victim.offset + victim.size_bytes / 2] ^= 0xff;
  WriteBytes(file, bytes);
  const Output run = RunAssay({"diff", Folder("a"), Folder("b"), "--json"});
  EXPECT_EQ(run.exit_code, 3);
  EXPECT_NE(run.err.find("damaged"), std::string::npos) << run.err;
  const Result<Json> json = ParseJson(run.out, "stdout");
  ASSERT_TRUE(json.ok());
  EXPECT_EQ((*json)["verdict"], "same");
  const std::string place = " at byte " + std::to_string(victim.offset);
  for (const std::vector<std::string>& traces : {std::vector{Folder("b")}, {Folder("a"), Folder("b")}}) {
    std::vector<std::string> arguments{"diagnose"};
    arguments.insert(arguments.end(), traces.begin(), traces.end());
    const Output diagnosed = RunAssay(arguments);
    EXPECT_EQ(diagnosed.exit_code, 3) << traces.size() << diagnosed.out;
    EXPECT_NE(diagnosed.err.find(place), std::string::npos) << diagnosed.err;
  }
  for (const std::vector<std::string>& form : {std::vector<std::string>{}, {"--json"}}) {
    std::vector<std::string> arguments{"show", Folder("b"), "--limit", "1"};
    arguments.insert(arguments.end(), form.begin(), form.end());
    const Output shown = RunAssay(arguments);
    EXPECT_EQ(shown.exit_code, 3);
    EXPECT_NE(shown.err.find(place), std::string::npos) << shown.err;
  }
  EXPECT_NE((*json)["coverage"]["notes"].dump().find(place), std::string::npos) << (*json)["coverage"]["notes"];
}

// Who waited for the text gets it, whatever became of the trace.
TEST_F(ReferenceCommand, FullDiskCostsTheTraceAndNotTheText) {
  std::filesystem::create_directory(Folder("small"));
  const std::string line = "unshare -rm sh -c 'mount -t tmpfs -o size=1m none " + Folder("small") +
                           " && exec " ASSAY_BINARY_DIR "/assay reference " + kModel +
                           " --tokens 5,6,7,8,9 --max-tokens 40 --ignore-eos --level payload --trace " +
                           Folder("small/t") + "' >" + Folder("out") + " 2>" + Folder("err");
  const int status = std::system(line.c_str());
  std::ifstream err(Folder("err"));
  const std::string said((std::istreambuf_iterator<char>(err)), std::istreambuf_iterator<char>());
  EXPECT_EQ(WEXITSTATUS(status), 4) << said;
  EXPECT_GT(std::filesystem::file_size(Folder("out")), 20u) << said;
}

TEST_F(ReferenceCommand, DamagedPayloadIsNamedAndNeverCalledFine) {
  for (const char* name : {"a", "b"}) {
    ASSERT_EQ(
        Reference({"--tokens", "5,6", "--max-tokens", "1", "--level", "payload", "--trace", Folder(name)}).exit_code,
        0);
  }
  const Output shown = RunAssay({"show", Folder("b"), "--site", "layers.0.attn.q", "--json"});
  EXPECT_EQ(shown.exit_code, 0);
  const Result<Json> json = ParseJson(shown.out, "stdout");
  ASSERT_TRUE(json.ok());
  const std::string hash = (*json)["steps"][0]["events"][0]["payload"]["sha256"];
  const std::string file = Folder("b") + "/payloads/" + hash, kept = Folder("kept");
  const auto damage = [](const std::string& how, const std::string& path) {
    if (how == "missing") {
      std::filesystem::remove(path);
    } else if (how == "truncated") {
      std::filesystem::resize_file(path, 1);
    } else {
      Bytes bytes = ReadBytes(path);
      bytes[bytes.size() / 2] ^= 1;
      WriteBytes(path, bytes);
    }
  };
  for (const std::string how : {"flipped", "truncated", "missing"}) {
    std::filesystem::copy_file(file, kept);
    damage(how, file);
    const Output diff = RunAssay({"diff", Folder("a"), Folder("b")}), show = RunAssay({"show", Folder("b")}),
                 check = RunAssay({"check", Folder("b")}), diagnose = RunAssay({"diagnose", Folder("b")});
    EXPECT_EQ(diff.exit_code, 3) << how;
    EXPECT_NE(diff.out.find(hash), std::string::npos) << how;
    EXPECT_EQ(show.exit_code, 3) << how;
    EXPECT_NE(show.out.find(hash), std::string::npos) << how;
    EXPECT_EQ(check.exit_code, 3) << how << check.out;
    EXPECT_NE(check.err.find(hash), std::string::npos) << how << check.err;
    EXPECT_EQ(diagnose.exit_code, 3) << how << diagnose.out;
    EXPECT_NE(diagnose.err.find(hash), std::string::npos) << how << diagnose.err;
    std::filesystem::remove(file);
    std::filesystem::rename(kept, file);
  }
}

TEST_F(ReferenceCommand, ChoicesBehindAFaultAreNoNearTies) {
  // The fault reaches the router of a later layer only through residual sums, which all add up.
  const std::string prompt = "And God said unto Moses";
  ASSERT_EQ(Reference({"--prompt", prompt, "--max-tokens", "4", "--ignore-eos", "--trace", Folder("a")}).exit_code, 0);
  ASSERT_EQ(Reference({"--prompt", prompt, "--max-tokens", "4", "--ignore-eos", "--path", "absorbed", "--fault",
                       "decode-output-unwritten@0", "--trace", Folder("b")})
                .exit_code,
            0);
  const Output run = RunAssay({"diff", Folder("a"), Folder("b"), "--json"});
  EXPECT_EQ(run.exit_code, 1);
  const Result<Json> json = ParseJson(run.out, "stdout");
  ASSERT_TRUE(json.ok());
  EXPECT_EQ((*json)["first_bad"]["name"], "layers.0.attn.out");
  EXPECT_EQ((*json)["near_ties"].size(), 0u) << (*json)["near_ties"].dump();
}

TEST_F(ReferenceCommand, OtherModelsAreNoted) {
  ASSERT_EQ(Reference({"--tokens", "5,6", "--max-tokens", "1", "--trace", Folder("a")}).exit_code, 0);
  ASSERT_EQ(Reference({"--tokens", "5,6", "--max-tokens", "1", "--trace", Folder("b"), "--config-override",
                       "num_hidden_layers=2"})
                .exit_code,
            0);
  const Output run = RunAssay({"diff", Folder("a"), Folder("b")});
  EXPECT_NE(run.out.find("model.n_layers 4 in A, 2 in B"), std::string::npos) << run.out;
  // What follows other layers is not compared, so nothing there is a fault.
  EXPECT_EQ(run.exit_code, 0) << run.out;
  EXPECT_NE(run.out.find("not compared, they follow layer 3 in A and layer 1 in B"), std::string::npos) << run.out;
}

TEST_F(ReferenceCommand, LayersThatWereOnlyNotRecordedAreBridged) {
  ASSERT_EQ(Reference({"--tokens", "5,6,7", "--max-tokens", "2", "--trace", Folder("a")}).exit_code, 0);
  ASSERT_EQ(
      Reference({"--tokens", "5,6,7", "--max-tokens", "2", "--trace", Folder("b"), "--fault", "moe-gate-up-swapped@3"},
                {"ASSAY_LAYERS=0-1"})
          .exit_code,
      0);
  const Output run = RunAssay({"diff", Folder("a"), Folder("b"), "--json"});
  EXPECT_EQ(run.exit_code, 1) << run.out;
  const Result<Json> json = ParseJson(run.out, "stdout");
  ASSERT_TRUE(json.ok());
  EXPECT_EQ((*json)["first_bad"]["name"], "final_norm");
}

TEST_F(ReferenceCommand, FiltersThatMatchNothingAreUsageErrors) {
  ASSERT_EQ(Reference({"--tokens", "5,6", "--max-tokens", "1", "--trace", Folder("a")}).exit_code, 0);
  const Output site = RunAssay({"show", Folder("a"), "--site", "layers.0.attn.qq"});
  EXPECT_EQ(site.exit_code, 2);
  EXPECT_NE(site.err.find("no site matches layers.0.attn.qq, the nearest is layers.0.attn.q"), std::string::npos)
      << site.err;
  for (const std::vector<std::string>& filter :
       std::vector<std::vector<std::string>>{{"--rank", "7"}, {"--step", "99"}, {"--request", "1234"}}) {
    const Output run = RunAssay({"show", Folder("a"), filter[0], filter[1], "--json"});
    EXPECT_EQ(run.exit_code, 2) << filter[0];
    EXPECT_NE(run.err.find("passes the filters"), std::string::npos) << run.err;
    EXPECT_EQ((*ParseJson(run.out, "stdout"))["events_matching"], 0);
  }
  const Output diff = RunAssay({"diff", Folder("a"), Folder("a"), "--tolerance", "layers.*.attn.qq:1e-3"});
  EXPECT_EQ(diff.exit_code, 2);
  EXPECT_NE(diff.err.find("no site of the traces matches"), std::string::npos) << diff.err;
  EXPECT_EQ(RunAssay({"check", Folder("a"), "--only", "nonsuch"}).exit_code, 2);
  EXPECT_EQ(RunAssay({"check", Folder("a"), "--only", "nonfinite", "--skip", "nonfinite"}).exit_code, 2);
  EXPECT_EQ(RunAssay({"sites", "attn.qq"}).exit_code, 2);
  EXPECT_EQ(RunAssay({"weights", kModel, "--only", "nonsuch*"}).exit_code, 2);
}

TEST_F(ReferenceCommand, TextChosenFromNaNIsSaid) {
  const std::vector<std::string> run = {"--tokens", "5,6,7", "--max-tokens", "3"};
  const Output clean = Reference(run);
  EXPECT_EQ(clean.err.find("warning"), std::string::npos) << clean.err;
  std::vector<std::string> faulty = run;
  faulty.insert(faulty.end(), {"--fault", "fp16-value-overflow@1", "--json"});
  const Output nonsense = Reference(faulty);
  EXPECT_EQ(nonsense.exit_code, 0);
  EXPECT_NE(nonsense.err.find("warning: 3 tokens were chosen from logits that hold NaN"), std::string::npos)
      << nonsense.err;
  EXPECT_EQ((*ParseJson(nonsense.out, "stdout"))["stats"]["nonfinite_choices"], 3);
}

TEST_F(ReferenceCommand, DamagedCheckpointIsNamedWithItsFile) {
  const std::string copy = Folder("copy");
  std::filesystem::copy(kModel, copy);
  std::filesystem::resize_file(copy + "/model-00002-of-00002.safetensors", 5000000);
  const Output run = RunAssay({"reference", copy, "--tokens", "1"});
  EXPECT_EQ(run.exit_code, 3);
  EXPECT_NE(run.err.find("model-00002-of-00002.safetensors"), std::string::npos) << run.err;
}

// Names in files are anybody's; a terminal obeys what looks like an escape sequence.
TEST_F(ReferenceCommand, NamesInFilesCannotSpeakToTheTerminal) {
  const auto write = [&](const std::string& dtype) {
    const std::string header =
        R"({"a\u001b[31m\u009b31m.weight":{"dtype":")" + dtype + R"(","shape":[1],"data_offsets":[0,4]}})";
    std::string bytes(8, '\0');
    for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
    const std::string path = Folder("named.safetensors");
    std::ofstream(path, std::ios::binary) << bytes << header << std::string(4, '\0');
    return path;
  };
  const auto is_plain = [](const std::string& text) {
    return text.find('\x1b') == std::string::npos && text.find("\xc2\x9b") == std::string::npos;
  };
  const Output refused = RunAssay({"weights", write("F33")});
  EXPECT_EQ(refused.exit_code, 3);
  EXPECT_TRUE(is_plain(refused.err)) << refused.err;
  EXPECT_NE(refused.err.find("\\x1b[31m"), std::string::npos) << refused.err;
  const Output listed = RunAssay({"weights", write("F32"), "--all"});
  EXPECT_NE(listed.out.find("\\x1b[31m"), std::string::npos) << listed.out << listed.err;
  EXPECT_TRUE(is_plain(listed.out)) << listed.out;
}

}  // namespace
}  // namespace assay::testing
