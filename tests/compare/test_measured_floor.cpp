// Where bounds are above the signal, the other layers decide: materialised attention against absorbed, of which most is
// recorded by one side only.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "compare/diff.h"
#include "compare/measured_floor.h"
#include "probe/recorder.h"
#include "trace/reader.h"

namespace assay {
namespace {

constexpr int64_t kRows = 14, kHeads = 4, kLatent = 12, kRope = 4, kNope = 8, kValue = 8;

using Rows = std::vector<float>;  // row-major

// Called on attn.out of a layer, [kRows, kHeads, kValue], before it is recorded.
using Fault = std::function<void(int64_t layer, Rows* out)>;

float Bf16(float x) {
  int exponent = 0;
  const float m = std::frexp(x, &exponent);
  return std::ldexp(std::nearbyint(m * 256), exponent - 8);
}

// Attention of each layer on latents and queries of its own, computed in double and rounded where it is recorded.
class LatentAttention {
 public:
  LatentAttention(const std::string& dir, int64_t layers, double query, bool absorbed, const Fault& fault)
      : query_(query), absorbed_(absorbed), bf16_(absorbed) {
    Settings settings;
    settings.profile = "all";
    settings.dir = dir;
    recorder_ = std::move(Recorder::Open(settings, ProcessInfo())).value();
    std::mt19937_64 random(3);
    for (int64_t layer = 0; layer < layers; ++layer) {
      prefix_ = "layers." + std::to_string(layer) + ".";
      Run(layer, &random, fault);
    }
    EXPECT_TRUE(recorder_->Close().ok());
  }

 private:
  static Rows Normal(int64_t n, double deviation, std::mt19937_64* random) {
    std::normal_distribution<double> normal(0, deviation);
    Rows out(static_cast<size_t>(n));
    for (float& x : out) x = static_cast<float>(normal(*random));
    return out;
  }

  float Round(double x) const { return bf16_ ? Bf16(static_cast<float>(x)) : static_cast<float>(x); }

  // shape: without the rows.
  void Put(const char* stem, const char* axes, const Rows& rows, std::vector<int64_t> shape) {
    shape.insert(shape.begin(), kRows);
    std::vector<int64_t> strides(shape.size(), 1);
    for (size_t i = shape.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * shape[i];
    const std::string site = prefix_ + stem;
    const RowRun run{77, 0, kRows, 0, false};
    Observation o;
    o.site = site.c_str();
    o.axes = axes;
    o.view = {rows.data(), DType::kF32, shape, strides, 0};
    o.compute_dtype = bf16_ ? DType::kBF16 : DType::kF32;
    o.runs = {&run, 1};
    const Status status = recorder_->Record(o);
    EXPECT_TRUE(status.ok()) << status.message();
  }

  void Run(int64_t layer, std::mt19937_64* random, const Fault& fault) {
    Rows latent = Normal(kRows * kLatent, 1, random), key_pe = Normal(kRows * kRope, 1, random);
    Rows query = Normal(kRows * kHeads * kNope, query_, random),
         query_pe = Normal(kRows * kHeads * kRope, query_, random);
    const Rows up = Normal(kHeads * kNope * kLatent, 1 / std::sqrt(double{kLatent}), random);
    const Rows values = Normal(kHeads * kValue * kLatent, 1 / std::sqrt(double{kLatent}), random);
    for (Rows* x : {&latent, &key_pe, &query, &query_pe}) {
      for (float& e : *x) e = Round(e);
    }
    Put("attn.kv_c_normed", "T c", latent, {kLatent});
    Put("attn.k_pe", "T 1 dr", key_pe, {1, kRope});
    Put("attn.q_nope", "T H dn", query, {kHeads, kNope});
    Put("attn.q_pe", "T H dr", query_pe, {kHeads, kRope});
    const auto at = [](const Rows& x, int64_t i) { return double{x[static_cast<size_t>(i)]}; };
    Rows keys, q_latent, out, seen;
    for (int64_t t = 0; t < kRows; ++t) {
      for (int64_t h = 0; h < kHeads; ++h) {
        for (int64_t d = 0; d < kNope; ++d) {
          double k = 0;
          for (int64_t c = 0; c < kLatent; ++c)
            k += at(latent, t * kLatent + c) * at(up, (h * kNope + d) * kLatent + c);
          keys.push_back(Round(k));
        }
        for (int64_t c = 0; c < kLatent; ++c) {
          double q = 0;
          for (int64_t d = 0; d < kNope; ++d) {
            q += at(query, (t * kHeads + h) * kNope + d) * at(up, (h * kNope + d) * kLatent + c);
          }
          q_latent.push_back(Round(q));
        }
      }
    }
    for (int64_t t = 0; t < kRows; ++t) {
      for (int64_t h = 0; h < kHeads; ++h) {
        std::vector<double> p;
        for (int64_t j = 0; j <= t; ++j) {
          double s = 0;
          for (int64_t d = 0; d < kRope; ++d) {
            s += at(query_pe, (t * kHeads + h) * kRope + d) * at(key_pe, j * kRope + d);
          }
          for (int64_t d = 0; d < (absorbed_ ? kLatent : kNope); ++d) {
            s += absorbed_ ? at(q_latent, (t * kHeads + h) * kLatent + d) * at(latent, j * kLatent + d)
                           : at(query, (t * kHeads + h) * kNope + d) * at(keys, (j * kHeads + h) * kNope + d);
          }
          p.push_back(std::exp(s / std::sqrt(double{kNope + kRope})));
        }
        double total = 0;
        for (const double x : p) total += x;
        std::vector<double> mean(kLatent, 0.0);
        for (int64_t j = 0; j <= t; ++j) {
          for (size_t c = 0; c < kLatent; ++c) {
            mean[c] += p[static_cast<size_t>(j)] / total * at(latent, j * kLatent + static_cast<int64_t>(c));
          }
        }
        for (double& x : mean) x = Round(x);
        for (const double x : mean) seen.push_back(static_cast<float>(x));
        for (int64_t d = 0; d < kValue; ++d) {
          double y = 0;
          for (size_t c = 0; c < kLatent; ++c) {
            y += mean[c] * at(values, (h * kValue + d) * kLatent + static_cast<int64_t>(c));
          }
          out.push_back(Round(y));
        }
      }
    }
    if (absorbed_) {
      Put("attn.q_latent", "T H c", q_latent, {kHeads, kLatent});
      Put("attn.latent_out", "T H c", seen, {kHeads, kLatent});
    } else {
      Put("attn.k_nope", "T H dn", keys, {kHeads, kNope});
    }
    if (fault) fault(layer, &out);
    Put("attn.out", "T H dv", out, {kHeads, kValue});
  }

  double query_;  // standard deviation of a query's elements
  bool absorbed_, bf16_;
  std::unique_ptr<Recorder> recorder_;
  std::string prefix_;
};

class MeasuredFloorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = ::testing::TempDir() + "/floor_" + std::to_string(::getpid());
    std::filesystem::create_directories(dir_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  // Materialised in f32 against absorbed in bf16.
  DiffResult Compare(int64_t layers, const Fault& fault, double query = 1.2) {
    for (const char* name : {"/a", "/b"}) std::filesystem::remove_all(dir_ + name);
    LatentAttention(dir_ + "/a", layers, query, false, nullptr);
    LatentAttention(dir_ + "/b", layers, query, true, fault);
    const auto a = std::move(Trace::Open(dir_ + "/a")).value(), b = std::move(Trace::Open(dir_ + "/b")).value();
    auto result = Diff(*a, *b, DiffOptions());
    EXPECT_TRUE(result.ok()) << result.status().message();
    return std::move(result).value();
  }

  static double BoundAt(const DiffResult& result, const std::string& name) {
    for (const SiteComparison& site : result.sites) {
      if (site.name == name) return site.bound;
    }
    return -1;
  }

  std::string dir_;
};

void RollHeads(Rows* out) {
  for (int64_t t = 0; t < kRows; ++t) {
    const auto row = out->begin() + t * kHeads * kValue;
    std::rotate(row, row + kValue, row + kHeads * kValue);
  }
}

TEST_F(MeasuredFloorTest, OtherPathIsNoiseUnderBoundsAboveTheSignal) {
  const DiffResult result = Compare(3, nullptr);
  EXPECT_EQ(result.verdict, Verdict::kNoise) << result.summary;
  EXPECT_GT(BoundAt(result, "layers.1.attn.out"), kWideBound);
}

TEST_F(MeasuredFloorTest, FaultBelowAWideBoundIsNamedByTheOtherLayers) {
  const std::vector<std::pair<const char*, std::function<void(Rows*)>>> faults = {
      {"heads rolled", RollHeads},
      {"a factor on all",
       [](Rows* out) {
         for (float& x : *out) x *= 1.3f;
       }},
      {"one row negated",
       [](Rows* out) {
         for (int64_t i = 5 * kHeads * kValue; i < 6 * kHeads * kValue; ++i) {
           (*out)[static_cast<size_t>(i)] *= -1;
         }
       }},
      {"last columns of each head zero",
       [](Rows* out) {
         for (size_t i = 0; i < out->size(); ++i) {
           if (i % kValue >= kValue - 2) (*out)[i] = 0;
         }
       }},
  };
  for (const auto& [name, fault] : faults) {
    for (const int64_t wrong : {0, 2}) {
      const DiffResult result = Compare(3, [&, &fault = fault](int64_t layer, Rows* out) {
        if (layer == wrong) fault(out);
      });
      ASSERT_EQ(result.verdict, Verdict::kFault) << name << wrong << result.summary;
      EXPECT_EQ(result.findings[0].name, "layers." + std::to_string(wrong) + ".attn.out") << name;
      EXPECT_EQ(result.findings.size(), 1u) << name;
    }
  }
}

// Twice the noise of the other layers: within the floor.
TEST_F(MeasuredFloorTest, LayerWithMoreNoiseIsNoise) {
  const DiffResult result = Compare(3, [](int64_t layer, Rows* out) {
    std::mt19937_64 random(9);
    std::normal_distribution<float> normal;
    if (layer != 1) return;
    for (float& x : *out) x *= 1 + 0.02f * normal(random);
  });
  EXPECT_EQ(result.verdict, Verdict::kNoise) << result.summary;
}

// No other layer: the bound of 1 and more cannot be replaced, and that is said.
TEST_F(MeasuredFloorTest, OneLayerAloneIsSaidNotToBeJudged) {
  const DiffResult result = Compare(
      1, [](int64_t, Rows* out) { RollHeads(out); }, 5);
  EXPECT_GT(BoundAt(result, "layers.0.attn.out"), 1);
  const auto& notes = result.coverage.notes;
  EXPECT_TRUE(std::any_of(notes.begin(), notes.end(), [](const std::string& note) {
    return note.find("not judged") != std::string::npos && note.find("layers.0.attn.out") != std::string::npos;
  }));
}

}  // namespace
}  // namespace assay
