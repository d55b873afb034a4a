#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>

#include "compare/toy_model.h"
#include "report/diff_report.h"
#include "report/finding_report.h"
#include "report/show_report.h"
#include "report/sites_report.h"
#include "sites/site_table.h"
#include "trace/writer.h"

namespace assay {
namespace {

DiffResult SmallResult() {
  DiffResult r;
  r.verdict = Verdict::kFault;
  r.summary = "fault: first wrong tensor layers.1.attn.out";
  FirstBad f;
  f.name = "layers.1.attn.out";
  f.layer = 1;
  f.step = 3;
  f.request = 0xffffffffffffffff;
  f.positions = {{13, 14}};
  f.heads = {0, 2};
  f.cls = "UNWRITTEN";
  f.measured = std::numeric_limits<double>::infinity();
  f.measured_of = "relative L2 of B - A";
  f.measured_from = "estimated from row sketches";
  f.bound = 1e-6;
  f.evidence = {"why"};
  r.findings = {f};
  r.coverage.sites_common = 4;
  r.coverage.sites_compared = 3;
  SiteComparison site;
  site.name = "layers.1.attn.out";
  site.rows = 20;
  site.rows_bad = 2;
  r.sites = {site};
  return r;
}

TEST(DiffJson, KeysFollowTheSchema) {
  const Json j = DiffJson(SmallResult(), "a", "b");
  EXPECT_EQ(j["schema"], "assay.diff/1");
  EXPECT_EQ(j["verdict"], "fault");
  EXPECT_EQ(j["first_bad"], j["findings"][0]);
  EXPECT_EQ(j["first_bad"]["request"], "ffffffffffffffff");  // a JSON number would round
  EXPECT_EQ(j["first_bad"]["measured"], "Infinity");
  EXPECT_EQ(j["first_bad"]["positions"], Json::parse("[[13,14]]"));
  EXPECT_DOUBLE_EQ(j["coverage"]["share"], 0.75);
  EXPECT_TRUE(j["sites"][0]["max_abs"].is_null());
  EXPECT_TRUE(j["sites"][0]["payload"].is_null());
  EXPECT_EQ(j["first_bad"]["measured_of"], "relative L2 of B - A");
  EXPECT_EQ(j["first_bad"]["measured_from"], "estimated from row sketches");
  EXPECT_EQ(j["sites"][0]["measured_from"], "row sketches");
  EXPECT_TRUE(j["sites"][0]["cosine_from"].is_null());
}

TEST(DiffJson, SaysWhatTheCosineOfASiteIsFrom) {
  DiffResult r = SmallResult();
  SiteComparison& site = r.sites[0];
  site.cosine = 0.5;
  EXPECT_EQ(DiffJson(r, "a", "b")["sites"][0]["cosine_from"], "row sketches");
  site.by_rows = false;
  EXPECT_EQ(DiffJson(r, "a", "b")["sites"][0]["cosine_from"], "segment sketches");
  site.payload.elements = 1;
  EXPECT_EQ(DiffJson(r, "a", "b")["sites"][0]["cosine_from"], "payloads");
  EXPECT_EQ(DiffJson(r, "a", "b")["sites"][0]["measured_from"], "segment sketches");
}

TEST(DiffJson, NoFindingIsNull) {
  DiffResult r;
  const Json j = DiffJson(r, "a", "b");
  EXPECT_TRUE(j["first_bad"].is_null());
  EXPECT_EQ(j["findings"].size(), 0u);
  EXPECT_EQ(j["verdict"], "incomparable");
  EXPECT_EQ(j["coverage"]["share"], 0.0);  // nothing compared is no full coverage
}

TEST(DiffText, NamesTheTensorItsPlaceAndItsBound) {
  const std::string text = DiffText(SmallResult(), "a", "b", false);
  for (const char* part : {"first wrong tensor: layers.1.attn.out", "positions 13-14", "heads 0,2", "UNWRITTEN",
                           "<- first wrong", "3 of 4 common sites", "A a (trusted)", "B b (in question)",
                           "measured  Inf relative L2 of B - A, bound 1.00e-06; estimated from row sketches"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
  }
}

TEST(FindingText, NamesOfAHostStayOnOneLineOfBoundedLength) {
  FirstBad f;
  f.name = "evil\x1b[2J\nfirst wrong tensor: other" + std::string(100000, 'x');
  f.cls = "KERNEL";
  f.constant_value = 2;
  f.constant = "used / expected";
  f.evidence = {"two\nlines"};
  for (const std::string& text : {FindingText(f, true), FindingText(f, false, "weight")}) {
    EXPECT_LT(text.size(), 3000u);
    EXPECT_EQ(text.find('\x1b'), std::string::npos);
    EXPECT_NE(text.find("\\x1b[2J\\nfirst"), std::string::npos) << text;
    EXPECT_NE(text.find("KERNEL, 2: used / expected"), std::string::npos) << text;
    EXPECT_NE(text.find("two\\nlines"), std::string::npos) << text;
  }
}

TEST(FindingText, AFactorNearOneIsNotPrintedAsOne) {
  FirstBad f;
  f.name = "layers.0.attn.kv_write";
  f.cls = "KV-SCALE";
  f.constant = "row read back / row written";
  f.constant_value = 1025.0 / 1024;
  EXPECT_NE(FindingText(f, true).find("KV-SCALE, 1.000977: row read back"), std::string::npos) << FindingText(f, true);
  f.constant_value = 1.0003;  // four digits would be 1
  EXPECT_NE(FindingText(f, true).find("KV-SCALE, 1.0003: row read back"), std::string::npos) << FindingText(f, true);
}

TEST(LedgerText, SaysWhatToRecordForWhatIsNotTestable) {
  const std::string text = LedgerText({{"rope", CheckState::kRuledOut, {"12 results", "0.1 of the bound"}, ""},
                                       {"moe", CheckState::kNotTestable, {}, "record moe.router_logits"}});
  EXPECT_EQ(text,
            "hypothesis  state         evidence\n"
            "rope        ruled out     12 results\n"
            "                          0.1 of the bound\n"
            "moe         not testable  to test it: record moe.router_logits\n");
}

TEST(LedgerText, WhatCouldNotBeJudgedIsNotRuledOut) {
  LedgerEntry entry{"linear layers", CheckState::kRuledOut, {"linear: 12 judged, all right"}, ""};
  entry.judged = 12;
  entry.not_judged = 782;
  EXPECT_NE(LedgerText({entry}).find("ruled out in 12 of 794"), std::string::npos) << LedgerText({entry});
}

TEST(FindingsJson, ConstantIsANumberWithItsMeaningOrNull) {
  FirstBad plain, scaled;
  scaled.constant_value = 0.5;
  scaled.constant = "scale used / declared";
  const Json j = FindingsJson({plain, scaled});
  EXPECT_TRUE(j[0]["first_bad"]["constant"].is_null());
  EXPECT_EQ(j[1]["first_bad"]["constant"]["value"], 0.5);
  EXPECT_EQ(j[1]["first_bad"]["constant"]["meaning"], "scale used / declared");
}

TEST(SitesJson, HasEverySiteWithItsInputs) {
  const Json j = SitesJson("");
  EXPECT_EQ(j["schema"], "assay.sites/1");
  EXPECT_EQ(j["sites"].size(), AllSites().size());
  const Json one = SitesJson("attn.v");
  ASSERT_EQ(one["sites"].size(), 1u);
  EXPECT_EQ(one["sites"][0]["name"], "layers.N.attn.v");
  EXPECT_EQ(one["sites"][0]["inputs_materialised"][0][0]["name"], "attn.v_proj");
}

class ShowTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = ::testing::TempDir() + "/show_" + std::to_string(getpid());
    testing::ToyOptions options;
    options.ranks = 2;
    options.decode_steps = 2;
    options.fault = [](const std::string& name, int request, int64_t first, testing::Matrix* m) {
      if (name == "layers.0.mlp.up" && request == 0 && first == 0) m->at(1, 1) = std::nanf("");
    };
    trace_ = testing::ToyModel::Run(dir_, options);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }
  std::string dir_;
  std::unique_ptr<Trace> trace_;
};

TEST_F(ShowTest, FiltersBySiteRankStepAndRequest) {
  ShowOptions options;
  options.sites = {"layers.0.attn.*"};
  options.ranks = {1};
  options.steps = {0};
  options.requests = {trace_->processes()[0].requests[0].key};
  const ShowModel model = MakeShowModel(*trace_, options);
  ASSERT_FALSE(model.events.empty());
  for (const ShownEvent& e : model.events) {
    EXPECT_TRUE(e.site.starts_with("layers.0.attn.")) << e.site;
    EXPECT_EQ(e.event.rank, 1);
    EXPECT_EQ(e.event.step, 0);
  }
  options.requests = {12345};
  EXPECT_TRUE(MakeShowModel(*trace_, options).events.empty());
}

TEST_F(ShowTest, StepsAscendAndTheLimitIsSaid) {
  ShowOptions options;
  options.limit = 10;
  const ShowModel model = MakeShowModel(*trace_, options);
  EXPECT_EQ(model.events.size(), 10u);
  EXPECT_EQ(model.matching, trace_->event_count());
  for (size_t i = 1; i < model.events.size(); ++i)
    EXPECT_LE(model.events[i - 1].event.step, model.events[i].event.step);
  EXPECT_NE(ShowText(*trace_, model, true).find("more events"), std::string::npos);
}

// The last value of each key wins.
TEST_F(ShowTest, MetadataOfManyKeysIsWrittenInLinearTime) {
  TraceWriterOptions options;
  options.dir = dir_ + "/keys";
  constexpr int kKeys = 100000;  // an object that looks for each key among all would take minutes
  {
    ProcessInfo process;
    for (int round : {0, 1}) {
      for (int i = 0; i < kKeys; ++i) process.meta.emplace_back("key" + std::to_string(i), std::to_string(round));
    }
    auto writer = TraceWriter::Open(options, process);
    ASSERT_TRUE(writer.ok()) << writer.status().message();
    EXPECT_TRUE((*writer)->Close().ok());
  }
  const auto trace = Trace::Open(options.dir);
  ASSERT_TRUE(trace.ok()) << trace.status().message();
  const auto start = std::chrono::steady_clock::now();
  const Json process = ShowJson(**trace, MakeShowModel(**trace, {}))["processes"][0];
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  ASSERT_EQ(process["meta"].size(), static_cast<size_t>(kKeys));
  EXPECT_EQ(process["meta"].begin().key(), "key0");
  EXPECT_EQ(process["meta"].begin().value(), "1");
}

TEST_F(ShowTest, StatisticsCountNaNAndCoverEveryElement) {
  ShowOptions options;
  options.sites = {"layers.0.mlp.up"};
  options.steps = {0};
  options.ranks = {0};
  const Json j = ShowJson(*trace_, MakeShowModel(*trace_, options));
  EXPECT_EQ(j["schema"], "assay.show/1");
  ASSERT_EQ(j["steps"].size(), 1u);
  const Json& event = j["steps"][0]["events"][0];
  EXPECT_EQ(event["shape"], Json::parse("[12,48]"));
  EXPECT_EQ(event["strides"], Json::parse("[48,1]"));
  EXPECT_EQ(event["stats"]["count"], 12 * 48);
  EXPECT_EQ(event["stats"]["nan"], 1);
  EXPECT_EQ(event["segments"][0]["rows"], 12);
}

}  // namespace
}  // namespace assay
