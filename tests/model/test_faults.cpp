// Every planted fault, in every layer where it can be planted: the trace of the faulty run differs from its clean
// twin's at the site that the table names, and at nothing that comes before it.
#include <algorithm>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <tuple>

#include "engine_runs.h"
#include "model/faults.h"
#include "sites/site_table.h"

namespace assay::testing {
namespace {

// Site, rank, request, position -> everything a row's cell says, step by step.
using RowKey = std::tuple<std::string, int32_t, uint64_t, int64_t>;
using StepRowsOf = std::map<int64_t, std::map<RowKey, std::vector<uint64_t>>>;

// Digests say whether the bits differ, which is all that is asked here.
StepRowsOf Rows(const Trace& trace) {
  StepRowsOf out;
  for (uint64_t i = 0; i < trace.event_count(); ++i) {
    const Event event = trace.event(i).Decode();
    const std::string& name = trace.site_names()[trace.event(i).global_site()];
    if (event.phase == Phase::kLoad) {  // a weight: before every step, one segment
      out[event.step][{name, event.rank, 0, 0}] = {event.segments.front().stats.digest,
                                                   event.segments.front().stats.nan};
    }
    for (const Segment& segment : event.segments) {
      for (int64_t r = 0; r < segment.n_rows; ++r) {
        const RowCell& cell = segment.rows[static_cast<size_t>(r)];
        out[event.step][{name, event.rank, segment.request, segment.first_position + r}] = {cell.digest,
                                                                                            cell.nonfinite};
      }
    }
  }
  return out;
}

// The first differing site in order of execution, "" when nothing differs.
std::string FirstDifference(const Trace& clean, const Trace& faulty) {
  const StepRowsOf a = Rows(clean), b = Rows(faulty);
  for (const auto& [step, rows] : a) {
    const auto other = b.find(step);
    if (other == b.end()) return "step " + std::to_string(step) + " is missing";
    std::string first;
    for (const auto& [key, cell] : rows) {
      const auto match = other->second.find(key);
      const std::string& name = std::get<0>(key);
      if (match == other->second.end()) return name + " is missing in step " + std::to_string(step);
      if (match->second == cell) continue;
      if (first.empty() || ExecutionOrder(ParseSiteName(name)) < ExecutionOrder(ParseSiteName(first))) first = name;
    }
    if (!first.empty()) return first;
  }
  return "";
}

// Under a sanitizer, ten times slower, the last of them: one layer takes the paths that all of its kind take.
std::vector<int64_t> LayersOf(const FaultDef& def) {
  const ModelConfig config = Config();
  std::vector<int64_t> out;
  for (int64_t layer = 0; layer < config.n_layers; ++layer) {
    if (def.needs.layers == LayerKind::kMoe && !config.is_moe(layer)) continue;
    if (def.needs.layers == LayerKind::kDense && config.is_moe(layer)) continue;
    out.push_back(layer);
  }
  if (ASSAY_SANITIZED) out.erase(out.begin(), out.end() - 1);
  return out;
}

// One instance for each row of the table of faults.
class PlantedFault : public ::testing::TestWithParam<FaultDef> {};

// The clean twin has the overrides of the configuration that the fault needs, and not the fault.
TEST_P(PlantedFault, IsFirstSeenWhereTheTableSays) {
  const FaultDef& def = GetParam();
  EngineOptions options;
  options.max_tokens = 4;
  options.ignore_eos = true;
  const std::vector<PromptInput> prompts = {{PromptA(), {}}};
  const bool in_layers = def.needs.layers != LayerKind::kNoLayer;
  for (const int64_t layer : in_layers ? LayersOf(def) : std::vector<int64_t>{-1}) {
    const std::string name = std::string(def.name) + (in_layers ? "@" + std::to_string(layer) : "");
    TempFolder clean_folder, faulty_folder;
    options.fault = "none:" + name;
    const auto clean = RunModel(options, prompts, clean_folder.path());
    ASSERT_TRUE(clean.ok()) << clean.status().message();
    options.fault = name;
    const auto faulty = RunModel(options, prompts, faulty_folder.path());
    ASSERT_TRUE(faulty.ok()) << faulty.status().message();
    std::string expected(def.first_bad);
    if (in_layers) expected.replace(expected.find(".N.") + 1, 1, std::to_string(layer));
    EXPECT_EQ(FirstDifference(*clean->trace, *faulty->trace), expected) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(All, PlantedFault, ::testing::ValuesIn(AllFaults().begin(), AllFaults().end()),
                         [](const ::testing::TestParamInfo<FaultDef>& fault) {
                           std::string name(fault.param.name);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(Faults, NamesAreUniqueAndSitesAreCanonical) {
  std::set<std::string_view> names;
  for (const FaultDef& def : AllFaults()) {
    EXPECT_TRUE(names.insert(def.name).second) << def.name;
    std::string site(def.first_bad);
    if (const size_t at = site.find(".N."); at != std::string::npos) site.replace(at + 1, 1, "0");
    const bool weight = def.first_bad.ends_with(".weight");
    EXPECT_TRUE(weight || ParseSiteName(site).def != nullptr) << def.first_bad;
  }
  EXPECT_GE(names.size(), 25u);
}

TEST(Faults, DocumentationHasEveryRow) {
  std::ifstream file(std::string(ASSAY_SOURCE_DIR) + "/docs/faults.md");
  const std::string page((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  for (const FaultDef& def : AllFaults()) {
    const std::string needs = DescribeNeeds(def.needs);
    const std::string row = "| `" + std::string(def.name) + "` | " + std::string(def.cls) + " | `" +
                            std::string(def.first_bad) + "` | " + std::string(def.what) + " | " +
                            (needs.empty() ? "–" : needs) + " |";
    EXPECT_NE(page.find(row), std::string::npos) << row;
  }
}

TEST(Faults, UnknownNameSuggestsTheNearest) {
  EngineOptions options;
  options.fault = "lse-base2";
  const auto run = RunModel(options, {{PromptA(), {}}});
  ASSERT_FALSE(run.ok());
  EXPECT_EQ(run.status().code(), Code::kUsage);
  EXPECT_NE(run.status().message().find("lse-base-2"), std::string::npos) << run.status().message();
}

TEST(Faults, ImpossibleLayerIsRefusedWithThePossibleOnes) {
  EngineOptions options;
  options.fault = "moe-no-renormalise@0";  // a dense layer
  const auto run = RunModel(options, {{PromptA(), {}}});
  ASSERT_FALSE(run.ok());
  EXPECT_EQ(run.status().code(), Code::kUsage);
  EXPECT_NE(run.status().message().find("possible: 2, 3"), std::string::npos) << run.status().message();
  options.fault = "rope-pairing@9";
  EXPECT_EQ(RunModel(options, {{PromptA(), {}}}).status().code(), Code::kUsage);
  options.fault = "rope-pairing@x";
  EXPECT_EQ(RunModel(options, {{PromptA(), {}}}).status().code(), Code::kUsage);
  options.fault = "embed-row-off@1";
  EXPECT_EQ(RunModel(options, {{PromptA(), {}}}).status().code(), Code::kUsage);
}

// A fault that changes nothing would teach that it cannot be found.
TEST(Faults, FaultWithoutEffectIsRefused) {
  EngineOptions options;
  options.max_tokens = 1;
  options.fault = "window-off-by-one";  // a prompt of five tokens never reaches a window of eight
  std::vector<int64_t> prompt = PromptA();
  prompt.resize(5);
  const auto run = RunModel(options, {{prompt, {}}});
  ASSERT_FALSE(run.ok());
  EXPECT_EQ(run.status().code(), Code::kUsage);
  EXPECT_NE(run.status().message().find("changed nothing"), std::string::npos) << run.status().message();
}

TEST(Faults, CleanTwinWithoutOverridesEqualsThePlainRun) {
  EngineOptions options;
  options.max_tokens = 6;
  const auto plain = RunModel(options, {{PromptA(), {}}});
  options.fault = "none:fused-stale-residual";
  const auto twin = RunModel(options, {{PromptA(), {}}});
  ASSERT_TRUE(plain.ok() && twin.ok());
  EXPECT_EQ(plain->generations[0].tokens, twin->generations[0].tokens);
}

}  // namespace
}  // namespace assay::testing
