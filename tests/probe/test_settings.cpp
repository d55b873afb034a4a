#include <gtest/gtest.h>

#include <cstdlib>

#include "probe/settings.h"

namespace assay {
namespace {

Result<Settings> Parse(std::vector<std::string> assignments) { return ParseSettings(assignments, false); }

// The message of a refused assignment; "accepted" when it was not.
std::string ErrorOf(const std::string& assignment) {
  const Result<Settings> result = Parse({assignment});
  if (result.ok()) return "accepted";
  EXPECT_EQ(result.status().code(), Code::kUsage);
  return result.status().message();
}

TEST(Settings, AbsentEmptyZeroAndOffAreOff) {
  EXPECT_FALSE(Parse({})->on());
  EXPECT_FALSE(Parse({"ASSAY="})->on());
  EXPECT_FALSE(Parse({"ASSAY=0"})->on());
  EXPECT_FALSE(Parse({"ASSAY=off"})->on());
  EXPECT_TRUE(Parse({"ASSAY=1"})->on());
  EXPECT_TRUE(Parse({"ASSAY=all"})->on());
}

TEST(Settings, GateTakesProfileAndSink) {
  const Settings s = *Parse({"ASSAY=mla:stderr"});
  EXPECT_EQ(s.profile, "mla");
  EXPECT_EQ(s.sink, "stderr");
  EXPECT_TRUE(s.include.matches("layers.3.attn.q"));
  EXPECT_FALSE(s.include.matches("layers.3.mlp.up"));
}

TEST(Settings, IncludeReplacesTheProfilesList) {
  const Settings s = *Parse({"ASSAY_INCLUDE=logits", "ASSAY=mla"});
  EXPECT_FALSE(s.include.matches("layers.3.attn.q"));
  EXPECT_TRUE(s.include.matches("logits"));
}

TEST(Settings, EveryKnobIsRead) {
  const Settings s =
      *Parse({"ASSAY=all", "ASSAY_DIR=/tmp/t-%r-%p-%h-%i-%%", "ASSAY_LEVEL=sample:3",
              "ASSAY_EXCLUDE=logits,/moe\\.(up|down)/", "ASSAY_LAYERS=0,1,4-6,9-", "ASSAY_RANKS=0", "ASSAY_STEPS=all",
              "ASSAY_BUDGET=events=2KiB,payload=3MB", "ASSAY_GRIDS=heads", "ASSAY_THREADS=4", "ASSAY_SEGMENT=128",
              "ASSAY_SEED=18446744073709551615", "ASSAY_RING=5", "ASSAY_TOKENS=on", "ASSAY_STRICT=1"});
  EXPECT_EQ(s.dir, "/tmp/t-%r-%p-%h-%i-%%");
  EXPECT_EQ(s.level, Level::kSample);
  EXPECT_EQ(s.sample_rows, 3);
  EXPECT_TRUE(s.exclude.matches("layers.1.moe.up"));
  EXPECT_FALSE(s.exclude.matches("layers.1.moe.router_logits"));
  for (int64_t in : {0, 1, 4, 5, 6, 9, 1000}) EXPECT_TRUE(s.layers.contains(in)) << in;
  for (int64_t out : {2, 3, 7, 8}) EXPECT_FALSE(s.layers.contains(out)) << out;
  EXPECT_FALSE(s.ranks.contains(1));
  EXPECT_TRUE(s.steps.contains(12345));
  EXPECT_EQ(s.byte_cap, 2048u);
  EXPECT_EQ(s.payload_budget, 3000000u);
  EXPECT_FALSE(s.row_grid);
  EXPECT_TRUE(s.head_grid);
  EXPECT_EQ(s.threads, 4);
  EXPECT_EQ(s.segment_rows, 128);
  EXPECT_EQ(s.seed, UINT64_MAX);
  EXPECT_EQ(s.ring_steps, 5);
  EXPECT_TRUE(s.tokens);
  EXPECT_TRUE(s.strict);
}

TEST(Settings, OneSizeSetsBothBudgets) {
  const Settings s = *Parse({"ASSAY_BUDGET=64MiB"});
  EXPECT_EQ(s.byte_cap, uint64_t{64} << 20);
  EXPECT_EQ(s.payload_budget, uint64_t{64} << 20);
}

// Whole messages: what a user sees is the interface.
TEST(Settings, ErrorsNameVariableColumnAndWhatIsExpected) {
  EXPECT_EQ(ErrorOf("ASSAY_LAYERS=0,x"),
            "ASSAY_LAYERS, column 3: expected intervals such as 0,1,4-6 or 3-, or all, found \"x\" (in \"0,x\")");
  EXPECT_EQ(ErrorOf("ASSAY_LAYERS=5-3"),
            "ASSAY_LAYERS, column 3: expected an end that is not below 5, found \"3\" (in \"5-3\")");
  EXPECT_EQ(ErrorOf("ASSAY_STEPS=1,"),
            "ASSAY_STEPS, column 3: expected intervals such as 0,1,4-6 or 3-, or all, found the end (in \"1,\")");
  EXPECT_EQ(ErrorOf("ASSAY_LEVEL=stat"),
            "ASSAY_LEVEL, column 1: expected names, shapes, stats, sample[:ROWS] or payload, found \"stat\"");
  EXPECT_EQ(
      ErrorOf("ASSAY_BUDGET=12XB"),
      "ASSAY_BUDGET, column 3: expected one of the units B KiB MiB GiB TiB KB MB GB TB, found \"XB\" (in \"12XB\")");
  EXPECT_EQ(ErrorOf("ASSAY_BUDGET=99999999TiB"),
            "ASSAY_BUDGET, column 1: expected a size below 2^64 bytes, found \"99999999TiB\"");
  EXPECT_EQ(ErrorOf("ASSAY_DIR=a%x"), "ASSAY_DIR, column 2: expected %r, %p, %h, %i or %%, found \"%x\" (in \"a%x\")");
  EXPECT_EQ(ErrorOf("ASSAY_GRIDS=rows,cols"),
            "ASSAY_GRIDS, column 6: expected rows, heads, rows,heads or none, found \"cols\" (in \"rows,cols\")");
  EXPECT_EQ(ErrorOf("ASSAY_THREADS=0"), "ASSAY_THREADS, column 1: expected a whole number from 1 to 256, found \"0\"");
  EXPECT_EQ(ErrorOf("ASSAY_TOKENS=maybe"), "ASSAY_TOKENS, column 1: expected on or off, found \"maybe\"");
  EXPECT_EQ(ErrorOf("ASSAY=all:file"),
            "ASSAY, column 5: expected the sink stderr behind ':', found \"file\" (in \"all:file\")");
  EXPECT_EQ(
      ErrorOf("ASSAY=mlaa"),
      "ASSAY, column 1: expected a profile (all, attn, mla, mlp, moe, io) or off, found \"mlaa\"; did you mean mla?");
}

// Regular expressions come from the environment and are compiled by the C library inside the host: none may take its
// memory.
TEST(Settings, BadPatternsAreRefusedWithTheirColumn) {
  EXPECT_EQ(ErrorOf("ASSAY_INCLUDE=a,,b"),
            "ASSAY_INCLUDE, column 3: expected a glob such as layers.*.attn.q, or /regex/, found \",b\" (in \"a,,b\")");
  EXPECT_EQ(ErrorOf("ASSAY_INCLUDE=/abc"),
            "ASSAY_INCLUDE, column 5: expected a closing '/' of the regular expression, found the end (in \"/abc\")");
  EXPECT_NE(ErrorOf("ASSAY_INCLUDE=/a(b/").find("column 2: expected a POSIX extended regular expression"),
            std::string::npos);
  EXPECT_NE(ErrorOf("ASSAY_INCLUDE=/(a)\\1/").find("without back references"), std::string::npos);
  EXPECT_NE(ErrorOf("ASSAY_INCLUDE=/(a{100}){100}/").find("product is at most 1000"), std::string::npos);
  // Each of these doubles what the C library builds; twenty of them would take gigabytes.
  EXPECT_NE(ErrorOf("ASSAY_INCLUDE=/a++++++++++++++++++++/").find("product is at most 1000"), std::string::npos);
  EXPECT_NE(ErrorOf("ASSAY_INCLUDE=/((((((((((a+)+)+)+)+)+)+)+)+)+/").find("product is at most 1000"),
            std::string::npos);
  EXPECT_NE(ErrorOf("ASSAY_INCLUDE=/((((((((((a{1,}){1,}){1,}){1,}){1,}){1,}){1,}){1,}){1,}){1,}/").find("1000"),
            std::string::npos);
  EXPECT_EQ(ErrorOf("ASSAY_INCLUDE=/layers\\.[0-9]+\\.attn\\.(q|k)+_[a-z]+/"), "accepted");
}

TEST(Settings, UnknownVariableNamesTheNearestKnownOne) {
  EXPECT_EQ(ErrorOf("ASSAY_LEVLE=stats"), "unknown variable ASSAY_LEVLE; did you mean ASSAY_LEVEL?");
  EXPECT_EQ(ErrorOf("ASSAY_STEP=1"), "unknown variable ASSAY_STEP; did you mean ASSAY_STEPS?");
  EXPECT_NE(ErrorOf("VERBOSE=1").find("unknown variable VERBOSE"), std::string::npos);
  EXPECT_NE(ErrorOf("all").find("expected NAME=VALUE"), std::string::npos);
}

TEST(Settings, EnvironmentIsOverriddenByAssignmentsAndCheckedForUnknownNames) {
  setenv("ASSAY", "all", 1);
  setenv("ASSAY_LEVEL", "payload", 1);
  setenv("ASSAY_ISA", "portable", 1);  // read elsewhere, known
  EXPECT_EQ(SettingsFromEnvironment()->level, Level::kPayload);
  const std::vector<std::string> names = {"ASSAY_LEVEL=names"};
  EXPECT_EQ(ParseSettings(names, true)->level, Level::kNames);
  EXPECT_EQ(ParseSettings(names, true)->profile, "all");
  EXPECT_FALSE(ParseSettings(names, false)->on());
  setenv("ASSAY_LEVELS", "names", 1);
  const Result<Settings> refused = SettingsFromEnvironment();
  EXPECT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().message(), "unknown variable ASSAY_LEVELS; did you mean ASSAY_LEVEL?");
  for (const char* name : {"ASSAY", "ASSAY_LEVEL", "ASSAY_LEVELS", "ASSAY_ISA"}) unsetenv(name);
}

TEST(Settings, InstructionSetThatIsNotThereIsRefused) {
  setenv("ASSAY_ISA", "avx3", 1);
  const Result<Settings> refused = SettingsFromEnvironment();
  unsetenv("ASSAY_ISA");
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kUsage);
  EXPECT_EQ(refused.status().message().find("ASSAY_ISA=avx3 is no instruction set"), 0u) << refused.status().message();
  EXPECT_NE(refused.status().message().find("portable"), std::string::npos);
  EXPECT_EQ(ErrorOf("ASSAY_ISA=portable"), "ASSAY_ISA is read from the environment alone; set it there");
}

// What a trace keeps of its settings can be given again; commas and brackets inside of patterns survive.
TEST(Settings, FormattedSettingsParseToThemselves) {
  for (const std::vector<std::string>& given : std::vector<std::vector<std::string>>{
           {},
           {"ASSAY=all"},
           {"ASSAY=mla:stderr", "ASSAY_LAYERS=0-3,9-", "ASSAY_LEVEL=sample:17", "ASSAY_GRIDS=none"},
           {"ASSAY=io", "ASSAY_INCLUDE=/a,b/,x[,]y", "ASSAY_BUDGET=1GiB", "ASSAY_SEED=7", "ASSAY_STRICT=on"},
           {"ASSAY=all", "ASSAY_PROBES=module:*.q,module:*.mlp:out,call:a.b:C.m,local:a.B.f:k#last,audit:a:f:out",
            "ASSAY_ATTACH=vllm,my.own", "ASSAY_ARMED=off"}}) {
    const auto text = FormatSettings(*Parse(given));
    std::vector<std::string> again;
    for (const auto& [name, value] : text) again.push_back(name + "=" + value);
    const Result<Settings> parsed = Parse(again);
    ASSERT_TRUE(parsed.ok()) << parsed.status().message();
    EXPECT_EQ(FormatSettings(*parsed), text);
  }
}

TEST(Settings, DefaultsInTheHelpAreTheDefaults) {
  const auto defaults = FormatSettings(Settings{});
  const auto value = [&](std::string_view name) {
    for (const auto& [n, v] : defaults) {
      if (n == name) return v;
    }
    return std::string("absent");
  };
  for (const SettingHelp& help : AllSettings()) {
    SCOPED_TRACE(std::string(help.name));
    if (value(help.name) == "absent") continue;  // lists: their default is said in words
    if (help.name == "ASSAY_BUDGET") {
      EXPECT_EQ(value(help.name), "events=4294967296,payload=1073741824");
    } else {
      EXPECT_EQ(value(help.name), help.default_value);
    }
  }
}

TEST(NameFilter, GlobsMatchTheWholeName) {
  EXPECT_TRUE(PatternMatches("layers.*.attn.q", "layers.12.attn.q"));
  EXPECT_FALSE(PatternMatches("layers.*.attn.q", "layers.12.attn.q_pe"));
  EXPECT_TRUE(PatternMatches("*attn*", "layers.12.attn.q"));
  EXPECT_TRUE(PatternMatches("layers.?.out", "layers.3.out"));
  EXPECT_FALSE(PatternMatches("layers.?.out", "layers.13.out"));
  EXPECT_TRUE(PatternMatches("layers.[0-3].out", "layers.2.out"));
  EXPECT_FALSE(PatternMatches("layers.[!0-3].out", "layers.2.out"));
  EXPECT_TRUE(PatternMatches("a[]]b", "a]b"));
  EXPECT_TRUE(PatternMatches("a[b", "a[b"));
  EXPECT_TRUE(PatternMatches("*", ""));
  EXPECT_FALSE(PatternMatches("", "x"));
  EXPECT_FALSE(PatternMatches("layers", "layers.0"));
}

TEST(NameFilter, ManyStarsStayPolynomial) {
  // A backtracking matcher would need more than 2^40 steps here.
  std::string pattern;
  for (int i = 0; i < 40; ++i) pattern += "a*";
  EXPECT_FALSE(PatternMatches(pattern + "b", std::string(400, 'a')));
}

TEST(NameFilter, RegexMatchesAnywhere) {
  EXPECT_TRUE(PatternMatches("/attn\\.(q|k)$/", "layers.0.attn.k"));
  EXPECT_FALSE(PatternMatches("/^attn/", "layers.0.attn.k"));
  EXPECT_FALSE(PatternMatches("/a(b/", "a(b"));  // invalid: matches nothing
}

TEST(NearestName, FarNamesAreNotOffered) {
  const std::string_view known[] = {"layers.0.attn.q", "logits"};
  EXPECT_EQ(NearestName("logit", known), "logits");
  EXPECT_EQ(NearestName("layers.0.attn.k", known), "layers.0.attn.q");
  EXPECT_EQ(NearestName("zzzz", known), "");
}

}  // namespace
TEST(Settings, SelectorOfNoKindAndNameThatIsNoVariableAreRefusedAtTheirColumn) {
  EXPECT_NE(ErrorOf("ASSAY_PROBES=module:x,calls:a.b").find("ASSAY_PROBES, column 10: expected module:GLOB"),
            std::string::npos);
  EXPECT_NE(ErrorOf("ASSAY_PROBES=module::out").find("column 8: expected a glob"), std::string::npos);
  EXPECT_NE(ErrorOf("ASSAY_PROBES=module:*.q:in").find("column 11: expected nothing or :out"), std::string::npos);
  EXPECT_NE(ErrorOf("ASSAY_PROBES=module:*.q:out:x").find("column 11"), std::string::npos);
  EXPECT_NE(ErrorOf("ASSAY_PROBES=call:f").find("column 6: expected a dotted name"), std::string::npos);
  EXPECT_NE(ErrorOf("ASSAY_PROBES=call:a..f").find("column 6: expected a dotted name"), std::string::npos);
  EXPECT_NE(ErrorOf("ASSAY_PROBES=local:a.f").find(":NAME"), std::string::npos);
  EXPECT_NE(ErrorOf("ASSAY_PROBES=local:a.f:k#0").find(":NAME"), std::string::npos);
  EXPECT_NE(ErrorOf("ASSAY_PROBES=module:x,").find("column 10"), std::string::npos);
  EXPECT_NE(ErrorOf("ASSAY_ATTACH=vllm,,x").find("ASSAY_ATTACH, column 6"), std::string::npos);
}

}  // namespace assay
