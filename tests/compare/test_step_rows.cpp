// Tensors without token rows that a step makes: rows sorted by expert correspond between two runs only where the step
// held the same rows with the same choices; pools of a cache never do; kinds of non-finite elements are told apart.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "compare/diff.h"
#include "probe/recorder.h"
#include "trace/reader.h"

namespace assay {
namespace {

constexpr int64_t kRows = 12, kHidden = 24, kExperts = 5, kChosen = 2, kLayer = 3;

// One mixture-of-experts layer up to the first GEMM, real arithmetic, one prompt a step.
struct MoeRun {
  std::vector<std::vector<float>> hidden;                                   // a step: [rows, kHidden]
  std::vector<std::vector<int64_t>> chosen;                                 // a step: [rows, kChosen]
  std::vector<float> gate_up = std::vector<float>(kHidden * 2 * kExperts);  // two columns an expert
  double act_scale = 1;                                                     // a fault: what moe.act is multiplied by
  std::string enters = "post_norm";  // site that the hidden rows are recorded as; empty: not recorded
  bool dispatched = true;            // recorded
  float dispatched_scale = 1;        // a fault: what moe.dispatched is multiplied by
};

MoeRun TwoSteps() {
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  MoeRun run;
  for (float& w : run.gate_up) w = normal(random);
  for (int step = 0; step < 2; ++step) {
    std::vector<float> hidden(kRows * kHidden);
    for (float& x : hidden) x = normal(random);
    std::vector<int64_t> chosen;
    for (int64_t r = 0; r < kRows; ++r) {
      const auto first = static_cast<int64_t>(random() % kExperts);
      chosen.push_back(first);
      chosen.push_back((first + 1 + static_cast<int64_t>(random() % (kExperts - 1))) % kExperts);
    }
    run.hidden.push_back(hidden);
    run.chosen.push_back(chosen);
  }
  return run;
}

// The same run with the noise of another kernel in what enters the layer.
MoeRun Disturbed(MoeRun run, float noise) {
  std::mt19937_64 random(6);
  std::normal_distribution<float> normal;
  for (std::vector<float>& hidden : run.hidden) {
    for (float& x : hidden) x += noise * normal(random) * std::fabs(x);
  }
  return run;
}

// In ±1, by a generator of one word.
double Uniform(uint64_t* state) {
  *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
  return static_cast<double>(*state >> 11) * 0x1p-52 - 1;
}

class StepRowsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = ::testing::TempDir() + "/step_rows_" + std::to_string(::getpid());
    std::filesystem::create_directories(dir_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  std::unique_ptr<Recorder> Open(const std::string& name) {
    Settings settings;
    settings.profile = "all";
    settings.dir = dir_ + "/" + name;
    settings.tokens = true;
    return std::move(Recorder::Open(settings, ProcessInfo())).value();
  }

  // runs empty: without token rows, axes must be given.
  static void Put(Recorder* recorder, const std::string& stem, const void* data, DType dtype, int64_t rows,
                  int64_t cols, int64_t step, const RowRun* run, const char* axes = nullptr) {
    const std::vector<int64_t> shape{rows, cols}, strides{cols, 1};
    const std::string site = "layers." + std::to_string(kLayer) + "." + stem;
    Observation o;
    o.site = site.c_str();
    o.view = {data, dtype, shape, strides, 0};
    o.step = step;
    o.phase = step == 0 ? Phase::kPrefill : Phase::kDecode;
    if (axes != nullptr) o.axes = axes;
    if (run != nullptr) o.runs = {run, 1};
    const Status status = recorder->Record(o);
    EXPECT_TRUE(status.ok()) << status.message();
  }

  std::unique_ptr<Trace> Record(const MoeRun& run, const std::string& name) {
    auto recorder = Open(name);
    for (size_t step = 0; step < run.hidden.size(); ++step) {
      const auto rows = static_cast<int64_t>(run.hidden[step].size()) / kHidden;
      const auto number = static_cast<int64_t>(step);
      const RowRun where{77, 0, rows, number * kRows, false};
      if (!run.enters.empty()) {
        Put(recorder.get(), run.enters, run.hidden[step].data(), DType::kF32, rows, kHidden, number, &where);
      }
      Put(recorder.get(), "moe.topk_ids", run.chosen[step].data(), DType::kI64, rows, kChosen, number, &where);
      std::vector<float> sorted, first;
      for (int64_t expert = 0; expert < kExperts; ++expert) {
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t* ids = &run.chosen[step][static_cast<size_t>(r * kChosen)];
          if (std::find(ids, ids + kChosen, expert) == ids + kChosen) continue;
          const float* x = &run.hidden[step][static_cast<size_t>(r * kHidden)];
          sorted.insert(sorted.end(), x, x + kHidden);
          for (int64_t c = 0; c < 2; ++c) {
            double sum = 0;
            for (int64_t k = 0; k < kHidden; ++k) {
              sum += double{x[k]} * double{run.gate_up[static_cast<size_t>((expert * 2 + c) * kHidden + k)]};
            }
            first.push_back(static_cast<float>(sum));
          }
        }
      }
      std::vector<float> act;
      for (size_t i = 0; i + 1 < first.size(); i += 2) {
        act.push_back(static_cast<float>(run.act_scale * double{first[i]} / (1 + std::exp(-double{first[i]})) *
                                         double{first[i + 1]}));
      }
      const auto n = static_cast<int64_t>(sorted.size()) / kHidden;
      for (float& x : sorted) x *= run.dispatched_scale;
      if (run.dispatched) {
        Put(recorder.get(), "moe.dispatched", sorted.data(), DType::kF32, n, kHidden, number, nullptr, "R h");
      }
      Put(recorder.get(), "moe.gate_up", first.data(), DType::kF32, n, 2, number, nullptr, "R 2f");
      Put(recorder.get(), "moe.act", act.data(), DType::kF32, n, 1, number, nullptr, "R f");
    }
    EXPECT_TRUE(recorder->Close().ok());
    return std::move(Trace::Open(dir_ + "/" + name)).value();
  }

  DiffResult Compare(const MoeRun& a, const MoeRun& b) {
    const auto ta = Record(a, "a"), tb = Record(b, "b");
    auto result = Diff(*ta, *tb, DiffOptions());
    EXPECT_TRUE(result.ok()) << result.status().message();
    return std::move(result).value();
  }

  std::string dir_;
};

// What enters differs by 2e-7 of itself: more than the rounding of a copy, and explained by the rows of the step.
TEST_F(StepRowsTest, RowsSortedByExpertMayDifferAsMuchAsTheRowsTheyCameFrom) {
  const MoeRun run = TwoSteps();
  const DiffResult result = Compare(run, Disturbed(run, 2e-7f));
  EXPECT_EQ(result.verdict, Verdict::kNoise) << result.summary;
}

// The norm before the experts was not recorded: what it is computed from says how far its rows may be apart.
TEST_F(StepRowsTest, SortedRowsAreHeldAgainstWhatStandsBehindANormThatWasNotRecorded) {
  MoeRun run = TwoSteps();
  run.enters = "attn.o_proj";
  MoeRun disturbed = Disturbed(run, 2e-7f);
  EXPECT_EQ(Compare(run, disturbed).verdict, Verdict::kNoise);
  run.dispatched = disturbed.dispatched = false;
  EXPECT_EQ(Compare(run, disturbed).verdict, Verdict::kNoise);
  disturbed.act_scale = 1.01;
  const DiffResult wrong = Compare(run, disturbed);
  ASSERT_EQ(wrong.verdict, Verdict::kFault) << wrong.summary;
  EXPECT_EQ(wrong.findings[0].name, "layers.3.moe.act");
}

TEST_F(StepRowsTest, WrongActivationIsNamedBehindRowsThatAgree) {
  const MoeRun run = TwoSteps();
  MoeRun wrong = Disturbed(run, 2e-7f);
  wrong.act_scale = 1.01;
  const DiffResult result = Compare(run, wrong);
  ASSERT_EQ(result.verdict, Verdict::kFault) << result.summary;
  EXPECT_EQ(result.findings[0].name, "layers.3.moe.act");
  EXPECT_EQ(result.findings.size(), 1u);
}

// The norm lies between what was recorded and the sorted rows: their difference comes through it, or from nowhere
// known.
TEST_F(StepRowsTest, RowsWhoseOriginWasNotRecordedMayDifferAsWhatIsBeforeThem) {
  for (const char* site : {"attn.o_proj", ""}) {
    MoeRun run = TwoSteps();
    run.enters = site;
    EXPECT_EQ(Compare(run, Disturbed(run, 4e-7f)).verdict, Verdict::kNoise) << site;
  }
}

TEST_F(StepRowsTest, WrongSortedRowsAreNamedWhereTheirOriginWasNotRecorded) {
  for (const char* site : {"attn.o_proj", ""}) {
    MoeRun run = TwoSteps();
    run.enters = site;
    MoeRun wrong = Disturbed(run, 4e-7f);
    wrong.dispatched_scale = 1.01f;
    const DiffResult result = Compare(run, wrong);
    ASSERT_EQ(result.verdict, Verdict::kFault) << result.summary;
    EXPECT_EQ(result.findings[0].name, "layers.3.moe.dispatched");
  }
}

// From step 1 on the runs hold other numbers of rows: the k-th recordings are no longer of the same rows.
TEST_F(StepRowsTest, StepsWithOtherRowsAreSetAside) {
  const MoeRun run = TwoSteps();
  MoeRun shorter = run;
  shorter.hidden[1].resize((kRows - 2) * kHidden);
  shorter.chosen[1].resize((kRows - 2) * kChosen);
  const DiffResult result = Compare(run, shorter);
  EXPECT_NE(result.verdict, Verdict::kFault) << result.summary;
  EXPECT_GE(result.coverage.rows_set_aside, 3u);  // dispatched, gate_up, act of step 1
}

// Another choice without a margin recorded is set aside; so must be what was sorted by it.
TEST_F(StepRowsTest, OtherChoicesSetTheSortedRowsAside) {
  const MoeRun run = TwoSteps();
  MoeRun other = Disturbed(run, 2e-7f);
  int64_t* ids = &other.chosen[0][4 * kChosen];
  ids[1] = (ids[0] + (ids[1] == (ids[0] + 1) % kExperts ? 2 : 1)) % kExperts;
  const DiffResult result = Compare(run, other);
  EXPECT_NE(result.verdict, Verdict::kFault) << result.summary;
  EXPECT_EQ(result.near_ties.size(), 1u);
}

TEST_F(StepRowsTest, PoolsAreNotCompared) {
  for (const char* name : {"a", "b"}) {
    auto recorder = Open(name);
    std::vector<float> written(kRows * kHidden, 0.5f), pool(64 * kHidden, 0.0f);
    const size_t at = name[0] == 'a' ? 3 : 20;
    std::copy(written.begin(), written.end(), pool.begin() + static_cast<ptrdiff_t>(at * kHidden));
    const RowRun where{77, 0, kRows, 0, false};
    Put(recorder.get(), "attn.k", written.data(), DType::kF32, kRows, kHidden, 0, &where, "T d");
    Put(recorder.get(), "attn.k_cache", pool.data(), DType::kF32, 64, kHidden, 0, nullptr, "S d");
    EXPECT_TRUE(recorder->Close().ok());
  }
  const auto a = std::move(Trace::Open(dir_ + "/a")).value(), b = std::move(Trace::Open(dir_ + "/b")).value();
  const DiffResult result = std::move(Diff(*a, *b, DiffOptions())).value();
  EXPECT_EQ(result.verdict, Verdict::kSame) << result.summary;
  const auto& notes = result.coverage.notes;
  EXPECT_TRUE(std::any_of(notes.begin(), notes.end(),
                          [](const std::string& note) { return note.find("attn.k_cache") != std::string::npos; }));
}

TEST_F(StepRowsTest, PlusAndMinusInfinityAreDifferentValues) {
  for (const char* name : {"a", "b"}) {
    auto recorder = Open(name);
    std::vector<float> lse(kRows * 4, 1.5f);
    const float inf = std::numeric_limits<float>::infinity();
    lse[9] = name[0] == 'a' ? -inf : inf;
    const RowRun where{77, 0, kRows, 0, false};
    Put(recorder.get(), "attn.lse", lse.data(), DType::kF32, kRows, 4, 0, &where);
    EXPECT_TRUE(recorder->Close().ok());
  }
  const auto a = std::move(Trace::Open(dir_ + "/a")).value(), b = std::move(Trace::Open(dir_ + "/b")).value();
  const DiffResult result = std::move(Diff(*a, *b, DiffOptions())).value();
  ASSERT_EQ(result.verdict, Verdict::kFault) << result.summary;
  EXPECT_EQ(result.findings[0].name, "layers.3.attn.lse");
}

// An output within its bound beside a wrong log-sum-exp of the same call: wrong scores if it is off by more than its
// inputs give, another base or factor of the log-sum-exp if it is not.
TEST_F(StepRowsTest, OutputIsNamedBeforeTheWrongLogSumExpOfItsCall) {
  constexpr int64_t kTokens = 10, kCols = 16;
  // Differences of the output and of the log-sum-exp, relative to their size; the inputs' is 1 %.
  const auto compare = [&](double output, double lse) {
    for (const char* name : {"a", "b"}) {
      auto recorder = Open(name);
      const RowRun where{77, 0, kTokens, 0, false};
      uint64_t random = 7;
      const auto put = [&](const char* stem, double difference) {
        std::vector<uint16_t> x;  // bf16
        for (int64_t i = 0; i < kTokens * kCols; ++i) {
          const double v = Uniform(&random), off = Uniform(&random);
          const auto value = static_cast<float>(v + (name[0] == 'b' ? difference * off : 0));
          x.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16));
        }
        Put(recorder.get(), stem, x.data(), DType::kBF16, kTokens, kCols, 0, &where, "T d");
      };
      for (const char* stem : {"attn.q", "attn.k", "attn.v"}) put(stem, 0.01);
      put("attn.out", output);
      put("attn.lse", lse);
      EXPECT_TRUE(recorder->Close().ok());
    }
    const auto a = std::move(Trace::Open(dir_ + "/a")).value(), b = std::move(Trace::Open(dir_ + "/b")).value();
    DiffResult result = std::move(Diff(*a, *b, DiffOptions())).value();
    std::filesystem::remove_all(dir_ + "/a");
    std::filesystem::remove_all(dir_ + "/b");
    return result;
  };
  EXPECT_EQ(compare(0.26, 0.01).verdict, Verdict::kNoise);
  const DiffResult scores = compare(0.26, 5);
  ASSERT_EQ(scores.findings.size(), 2U) << scores.summary;
  EXPECT_EQ(scores.findings[0].name, "layers.3.attn.out");
  EXPECT_EQ(scores.findings[1].name, "layers.3.attn.lse");
  const DiffResult alone = compare(0.01, 5);
  ASSERT_EQ(alone.findings.size(), 1U) << alone.summary;
  EXPECT_EQ(alone.findings[0].name, "layers.3.attn.lse");
}

}  // namespace
}  // namespace assay
