// The golden vectors, made by tests/stats/golden.py, on every instruction set.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "stats/measure.h"

namespace assay {
namespace {

using Json = nlohmann::json;

std::vector<uint8_t> FromHex(const std::string& hex) {
  std::vector<uint8_t> bytes;
  for (size_t k = 0; k + 1 < hex.size(); k += 2) {
    bytes.push_back(static_cast<uint8_t>(std::stoi(hex.substr(k, 2), nullptr, 16)));
  }
  bytes.push_back(0);  // never empty
  return bytes;
}

// 64-bit numbers are text in the file: JSON readers of other languages cut them to doubles.
uint64_t Number(const Json& text) { return std::stoull(text.get<std::string>()); }

// Float running sums of at most 256 additions of elements of this norm, then double.
double SketchBound(double sum_sq, double n) { return 256 * 0x1p-24 * std::sqrt(sum_sq * n); }

void ExpectSketch(std::span<const double> got, const Json& want, double bound, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t k = 0; k < got.size(); ++k)
    EXPECT_LE(std::abs(got[k] - want[k].get<double>()), bound) << what << " " << k;
}

// null in the file: no finite element, which the library says with NaN.
void ExpectExtreme(double got, const Json& want, const std::string& what) {
  if (want.is_null()) {
    EXPECT_TRUE(std::isnan(got)) << what;
  } else {
    EXPECT_EQ(got, want.get<double>()) << what;
  }
}

// Counts, extremes, digests and histogram bit for bit, sums and sketches within the bounds of docs/numerics.md.
void ExpectSegment(const Segment& got, const Json& want, double sum_bound, const std::string& what) {
  const Stats& s = got.stats;
  EXPECT_EQ(got.request, Number(want["request"])) << what;
  EXPECT_EQ(got.first_position, want["first_position"].get<int64_t>()) << what;
  EXPECT_EQ(got.n_rows, want["n_rows"].get<int64_t>()) << what;
  EXPECT_EQ(got.first_row, want["first_row"].get<int64_t>()) << what;
  EXPECT_EQ(got.padding, want["padding"].get<bool>()) << what;
  EXPECT_EQ(s.count, want["count"].get<uint64_t>()) << what;
  EXPECT_EQ(s.nan, want["nan"].get<uint64_t>()) << what;
  EXPECT_EQ(s.pos_inf, want["pos_inf"].get<uint64_t>()) << what;
  EXPECT_EQ(s.neg_inf, want["neg_inf"].get<uint64_t>()) << what;
  EXPECT_EQ(s.zero, want["zero"].get<uint64_t>()) << what;
  EXPECT_EQ(s.subnormal, want["subnormal"].get<uint64_t>()) << what;
  ExpectExtreme(s.min, want["min"], what);
  ExpectExtreme(s.max, want["max"], what);
  ExpectExtreme(s.abs_max, want["abs_max"], what);
  EXPECT_EQ(s.abs_max_index, want["abs_max_index"].get<uint64_t>()) << what;
  EXPECT_EQ(s.digest, Number(want["digest"])) << what;
  EXPECT_EQ(s.digest_split, want["digest_split"].get<bool>()) << what;
  const double sum_sq = want["sum_sq"].get<double>();
  const double n = static_cast<double>(s.count);
  EXPECT_LE(std::abs(s.sum - want["sum"].get<double>()), sum_bound * want["sum_abs"].get<double>()) << what;
  EXPECT_LE(std::abs(s.sum_sq - sum_sq), sum_bound * sum_sq) << what;
  EXPECT_EQ(s.histogram_samples, want["histogram_samples"].get<uint64_t>()) << what;
  ASSERT_EQ(s.histogram.size(), want["histogram"].size()) << what;
  for (size_t k = 0; k < s.histogram.size(); ++k) {
    EXPECT_EQ(s.histogram[k].exponent, want["histogram"][k][0].get<int>()) << what;
    EXPECT_EQ(s.histogram[k].count, want["histogram"][k][1].get<uint32_t>()) << what;
  }
  ExpectSketch(s.sketch, want["sketch"], SketchBound(sum_sq, n), what);
  ASSERT_EQ(got.rows.size(), want["rows"].size()) << what;
  for (size_t r = 0; r < got.rows.size(); ++r) {
    const Json& row = want["rows"][r];
    EXPECT_EQ(got.rows[r].digest, Number(row["digest"])) << what << " row " << r;
    EXPECT_EQ(got.rows[r].nonfinite, row["nonfinite"].get<uint32_t>()) << what << " row " << r;
    const double row_sq = row["sum_sq"].get<double>();
    EXPECT_LE(std::abs(got.rows[r].sum_sq - row_sq), sum_bound * row_sq) << what << " row " << r;
    ExpectSketch(got.rows[r].sketch, row["sketch"], SketchBound(row_sq, n), what + " row sketch");
  }
  ASSERT_EQ(got.heads.size(), want["heads"].size()) << what;
  for (size_t h = 0; h < got.heads.size(); ++h) {
    const Json& head = want["heads"][h];
    EXPECT_EQ(got.heads[h].nonfinite, head["nonfinite"].get<uint32_t>()) << what << " head " << h;
    const double head_sq = head["sum_sq"].get<double>();
    EXPECT_LE(std::abs(got.heads[h].sum_sq - head_sq), sum_bound * head_sq) << what << " head " << h;
    ExpectSketch(got.heads[h].sketch, head["sketch"], SketchBound(head_sq, n), what + " head sketch");
  }
}

// The file is a second implementation's answer: what both share is the description alone.
TEST(Golden, EveryInstructionSetMatchesTheVectors) {
  std::ifstream file(ASSAY_SOURCE_DIR "/tests/golden/stats.json");
  ASSERT_TRUE(file.good());
  const Json document = Json::parse(file);
  ASSERT_EQ(document["schema"], "assay.golden.stats/1");
  ASSERT_GE(document["cases"].size(), 25u);
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (!IsaUsable(isa)) continue;
    for (const Json& c : document["cases"]) {
      const std::string what = c["name"].get<std::string>() + " " + NameOf(isa);
      const std::vector<uint8_t> data = FromHex(c["data"].get<std::string>());
      const std::vector<int64_t> shape = c["shape"].get<std::vector<int64_t>>();
      std::vector<int64_t> strides(shape.size(), 1);
      for (size_t a = shape.size(); a-- > 1;) strides[a - 1] = strides[a] * shape[a];
      std::vector<RowRun> runs;
      for (const Json& r : c["runs"]) {
        runs.push_back({Number(r["request"]), r["first_row"], r["n_rows"], r["first_position"], r["padding"]});
      }
      LogicalLayout logical;
      logical.row_axis = c["row_axis"];
      logical.head_axis = c["head_axis"];
      logical.full_cols = c["full_cols"];
      logical.col_offset = c["col_offset"];
      logical.row_offset = c["row_offset"];
      logical.segment_rows = c["segment_rows"];
      logical.runs = runs;
      const TensorView view{data.data(), ParseDType(c["dtype"].get<std::string>()), shape, strides, 0};
      MeasureOptions options;
      options.isa = isa;
      std::vector<Segment> segments;
      const Status status = Measure(view, logical, options, &segments);
      ASSERT_TRUE(status.ok()) << what << ": " << status.message();
      ASSERT_EQ(segments.size(), c["segments"].size()) << what;
      const bool narrow = IsFloat(view.dtype) && BitsOf(view.dtype) <= (isa == Isa::kAvx512 ? 32 : 16);
      for (size_t k = 0; k < segments.size(); ++k) {
        const double n = static_cast<double>(segments[k].stats.count);
        ExpectSegment(segments[k], c["segments"][k], (n + 2) * 0x1p-53 + (narrow ? 18 * 0x1p-24 : 0), what);
      }
    }
  }
}

}  // namespace
}  // namespace assay
