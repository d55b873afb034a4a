// Choices that differ between two runs: near ties within what the scores' difference may close, findings beyond.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "compare/diff.h"
#include "probe/recorder.h"
#include "trace/reader.h"

namespace assay {
namespace {

constexpr int kRows = 60, kVocab = 2048;
constexpr float kNoise = 0.02f;  // root mean square of the logits' difference: a bf16 run of logits of size 4

struct Scores {
  std::vector<float> logits;   // [kRows, kVocab]
  std::vector<float> margins;  // [kRows]
  std::vector<int64_t> tokens;
};

// Greedy choice of each row, and its margin over the second.
void Choose(Scores* run) {
  run->tokens.assign(kRows, 0);
  run->margins.assign(kRows, 0);
  for (size_t r = 0; r < kRows; ++r) {
    std::vector<float> row(run->logits.begin() + static_cast<ptrdiff_t>(r * kVocab),
                           run->logits.begin() + static_cast<ptrdiff_t>((r + 1) * kVocab));
    run->tokens[r] = std::max_element(row.begin(), row.end()) - row.begin();
    std::nth_element(row.begin(), row.begin() + 1, row.end(), std::greater<>());
    run->margins[r] = run->logits[r * kVocab + static_cast<size_t>(run->tokens[r])] - row[1];
  }
}

// Logits whose two largest of row 7 lie `gap` apart, and the same with the noise of another kernel.
std::pair<Scores, Scores> TwoRuns(float gap) {
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  Scores a;
  for (int i = 0; i < kRows * kVocab; ++i) a.logits.push_back(4 * normal(random));
  a.logits[7 * kVocab + 100] = 30;
  a.logits[7 * kVocab + 200] = 30 - gap;
  Scores b = a;
  for (float& x : b.logits) x += kNoise * normal(random);
  Choose(&a);
  Choose(&b);
  return {a, b};
}

class ChoiceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = ::testing::TempDir() + "/choices_" + std::to_string(::getpid());
    std::filesystem::create_directories(dir_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  std::unique_ptr<Trace> Record(const Scores& run, const std::string& name) {
    Settings settings;
    settings.profile = "all";
    settings.dir = dir_ + "/" + name;
    settings.tokens = true;
    auto recorder = std::move(Recorder::Open(settings, ProcessInfo())).value();
    const RowRun rows{77, 0, kRows, 0, false};
    const auto record = [&](const char* site, const void* data, DType dtype, std::vector<int64_t> shape) {
      const std::vector<int64_t> strides =
          shape.size() == 2 ? std::vector<int64_t>{shape[1], 1} : std::vector<int64_t>{1};
      Observation o;
      o.site = site;
      o.view = {data, dtype, shape, strides, 0};
      o.step = 0;
      o.runs = {&rows, 1};
      EXPECT_TRUE(recorder->Record(o).ok());
    };
    if (with_scores_) record("logits", run.logits.data(), DType::kF32, {kRows, kVocab});
    record("next_token.margin", run.margins.data(), DType::kF32, {kRows});
    record("next_token", run.tokens.data(), DType::kI64, {kRows});
    EXPECT_TRUE(recorder->Close().ok());
    return std::move(Trace::Open(settings.dir)).value();
  }

  // bf16 noise is given as such: the logits alone would be a finding between f32 runs.
  DiffResult Compare(const Scores& a, const Scores& b) {
    DiffOptions options;
    if (with_scores_) options.tolerance = "logits:0.1";
    return std::move(Diff(*Record(a, "a"), *Record(b, "b"), options)).value();
  }

  std::string dir_;
  bool with_scores_ = true;
};

TEST_F(ChoiceTest, FlipWithinTheNoiseOfTheScoresIsANearTie) {
  auto [a, b] = TwoRuns(kNoise);
  b.logits[7 * kVocab + 100] = 30 - kNoise;
  b.logits[7 * kVocab + 200] = 30 + kNoise / 2;
  Choose(&b);
  ASSERT_NE(a.tokens[7], b.tokens[7]);
  const DiffResult r = Compare(a, b);
  EXPECT_EQ(r.verdict, Verdict::kNoise) << r.summary;
  ASSERT_EQ(r.near_ties.size(), 1u);
  EXPECT_EQ(r.near_ties[0].position, 7);
  EXPECT_NEAR(r.near_ties[0].margin, (kNoise + 1.5 * kNoise) / 2, kNoise / 100);
  // Far below what the two logits could take if they took all of the difference, kNoise sqrt(2048) = 0.9.
  EXPECT_LT(r.near_ties[0].bound, 0.5);
  EXPECT_GT(r.near_ties[0].bound, r.near_ties[0].margin);
}

// The scores agree to 0.02 and the margin is 1: no noise explains token 200.
TEST_F(ChoiceTest, FlipFarBeyondTheNoiseOfTheScoresIsAFault) {
  auto [a, b] = TwoRuns(1);
  b.tokens[7] = 200;  // a wrong pick: the margin says 1, the scores moved by 0.02
  const DiffResult r = Compare(a, b);
  EXPECT_EQ(r.verdict, Verdict::kFault) << r.summary;
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].name, "next_token");
  EXPECT_EQ(r.near_ties.size(), 0u);
}

// Margins alone do not say how far the scores of the two runs lie apart; the flip is listed, without a margin to trust.
TEST_F(ChoiceTest, WithoutTheScoresNoFlipCanBeJudged) {
  auto [a, b] = TwoRuns(1);
  b.tokens[7] = 200;
  with_scores_ = false;
  const DiffResult r = Compare(a, b);
  EXPECT_NE(r.verdict, Verdict::kFault) << r.summary;
  ASSERT_EQ(r.near_ties.size(), 1u);
  EXPECT_LT(r.near_ties[0].margin, 0);
}

}  // namespace
}  // namespace assay
