// Figures of a comparison that come from stored values, element by element.
#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <limits>

#include "diff_test.h"

namespace assay {
namespace {

using testing::DiffTest;
using testing::Matrix;
using testing::ToyOptions;

TEST_F(DiffTest, PayloadsOfEveryRankAreCompared) {
  for (const std::string site : {"layers.0.attn.k", "layers.0.post_norm", "layers.0.mlp.down.partial"}) {
    ToyOptions a, b;
    a.ranks = b.ranks = 4;
    a.key_shards = b.key_shards = 2;
    a.payloads = b.payloads = true;
    b.rank_fault = [&](const std::string& name, int32_t rank, Matrix* part) {
      if (name == site && rank == 3) part->at(0, 3) += 2;
    };
    b.fault = [&](const std::string& name, int, int64_t, Matrix* m) {
      if (name == "layers.0.mlp.down.partial3" && site == "layers.0.mlp.down.partial") m->at(0, 3) += 2;
    };
    const DiffResult r = Compare(a, b);
    const auto line = std::find_if(r.sites.begin(), r.sites.end(), [&](const auto& s) { return s.name == site; });
    ASSERT_NE(line, r.sites.end()) << site;
    EXPECT_NEAR(line->payload.max_abs, 2, 1e-5) << site << Describe(r);
    EXPECT_GT(line->payload.rel_l2, 0) << site;
  }
}

// Two traces at level payload, each with one row of the site.
template <class T>
DiffResult ComparePayloads(const std::string& dir, DType dtype, const std::vector<T> (&values)[2]) {
  std::unique_ptr<Trace> traces[2];
  for (int side : {0, 1}) {
    Settings settings;
    settings.profile = "all";
    settings.dir = dir + "/" + std::to_string(side);
    settings.level = Level::kPayload;
    auto recorder = Recorder::Open(settings, {});
    EXPECT_TRUE(recorder.ok()) << recorder.status().message();
    const int64_t shape[2] = {1, static_cast<int64_t>(values[side].size())}, strides[2] = {shape[1], 1};
    const RowRun run{7, 0, 1, 0, false};
    Observation o;
    o.site = "layers.0.out";
    o.axes = "T h";
    o.view.data = values[side].data();
    o.view.dtype = dtype;
    o.view.shape = shape;
    o.view.strides = strides;
    o.runs = {&run, 1};
    EXPECT_TRUE((*recorder)->Record(o).ok());
    EXPECT_TRUE((*recorder)->Close().ok());
    auto trace = Trace::Open(settings.dir);
    EXPECT_TRUE(trace.ok());
    traces[side] = std::move(trace).value();
  }
  auto result = Diff(*traces[0], *traces[1], {});
  EXPECT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result->sites.size(), 1u);
  return std::move(result).value();
}

// n_rows rows of four columns, the last of them -inf as masked scores have it; by `other` in the last row.
std::unique_ptr<Trace> Masked(const std::string& dir, int64_t n_rows, float value, float other) {
  Settings settings;
  settings.profile = "all";
  settings.dir = dir;
  auto recorder = Recorder::Open(settings, {});
  EXPECT_TRUE(recorder.ok()) << recorder.status().message();
  const int64_t shape[2] = {n_rows, 4}, strides[2] = {4, 1};
  std::vector<float> values(static_cast<size_t>(4 * n_rows), value);
  for (size_t i = 3; i < values.size(); i += 4) values[i] = -std::numeric_limits<float>::infinity();
  values.back() = other;
  const RowRun run{7, 0, n_rows, 0, false};
  Observation o;
  o.site = "layers.0.attn.scores";
  o.axes = "T h";
  o.view = {values.data(), DType::kF32, shape, strides, 0};
  o.runs = {&run, 1};
  EXPECT_TRUE((*recorder)->Record(o).ok());
  EXPECT_TRUE((*recorder)->Close().ok());
  auto trace = Trace::Open(dir);
  EXPECT_TRUE(trace.ok());
  return std::move(trace).value();
}

// Rows of masked scores all ask which kinds of non-finite values their segments hold. 40000 rows take less than 0.04 s
// of one core where an event is decoded once, and 14 s where each row decodes it; a sanitized build has room below 3 s.
TEST_F(DiffTest, KindsOfNonFiniteAreComparedInLinearTime) {
  constexpr int64_t kRows = 40000;
  const float infinity = std::numeric_limits<float>::infinity();
  const auto a = Masked(dir_ + "/a", kRows, 1, -infinity);
  for (const float other : {-infinity, infinity, std::numeric_limits<float>::quiet_NaN()}) {
    const auto b = Masked(dir_ + "/b", kRows, 1.0000001F, other);
    const std::clock_t begin = std::clock();
    const auto r = Diff(*a, *b, {});
    const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
    ASSERT_TRUE(r.ok()) << r.status().message();
    EXPECT_LT(seconds, 3);
    EXPECT_EQ(r->verdict == Verdict::kFault, other != -infinity) << other << Describe(*r);
    std::filesystem::remove_all(dir_ + "/b");
  }
}

// The smallest numbers of a double, and two whose difference is none.
TEST_F(DiffTest, PayloadsAtTheEndsOfDoubleAreCompared) {
  const double tiny = std::numeric_limits<double>::denorm_min(), huge = std::numeric_limits<double>::max();
  const std::vector<double> values[2] = {{1, tiny, 0, 1}, {1, 2 * tiny, tiny, 2}};
  const DiffResult small = ComparePayloads(dir_ + "/small", DType::kF64, values);
  EXPECT_EQ(small.sites[0].payload.elements, 4u);
  EXPECT_EQ(small.sites[0].payload.ulp_histogram[0], 1u);
  EXPECT_EQ(small.sites[0].payload.ulp_histogram[1], 2u);  // neighbours
  const std::vector<double> ends[2] = {{huge}, {-huge}};
  const DiffResult large = ComparePayloads(dir_ + "/large", DType::kF64, ends);
  EXPECT_EQ(large.sites[0].payload.ulp_histogram[PayloadDifference::kUlpBins - 1], 1u);
  EXPECT_GT(large.sites[0].payload.max_abs, huge);
}

// By codes: neighbours are one ulp apart among subnormal numbers too, and 3 codes are three.
TEST_F(DiffTest, SubnormalNeighboursOfNarrowTypesAreOneUlpApart) {
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    const std::vector<uint16_t> values[2] = {{0x0001, 0x0010, 0x0020, 0x3c00}, {0x0002, 0x0013, 0x0021, 0x3c00}};
    const DiffResult r = ComparePayloads(dir_ + "/" + std::string(NameOf(dtype)), dtype, values);
    const PayloadDifference& p = r.sites[0].payload;
    EXPECT_EQ(p.ulp_max, 3) << NameOf(dtype);
    EXPECT_EQ(p.ulp_histogram[0], 1u);
    EXPECT_EQ(p.ulp_histogram[1], 2u);
    EXPECT_EQ(p.ulp_histogram[3], 1u);
  }
}

}  // namespace
}  // namespace assay
