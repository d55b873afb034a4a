// Experts of a mixture: single experts that go wrong, orders of gate and up, combine weights on the inputs, codes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "check/check.h"
#include "small_trace.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::ExpectNamed;
using testing::Judge;
using testing::Noise;
using testing::Put;
using testing::SmallTrace;

constexpr int kTokens = 12, kChosen = 2, kExperts = 4, kIn = 16, kHalf = 8, kWide = 2 * kHalf;
using Values = std::vector<float>;

// A layer of experts as it should be; a test changes what it says is wrong, and records it.
struct Mixture {
  Values post_norm = Noise(kTokens * kIn, 1);
  std::vector<int64_t> ids;
  Values weights = Noise(kTokens * kChosen, 2);
  Values matrix = Noise(kExperts * kWide * kIn, 3), bias = Noise(kExperts * kWide, 4);
  std::vector<int> token, expert, choice;  // of each row sent

  Mixture() {
    for (int t = 0; t < kTokens; ++t) {
      ids.push_back(t % kExperts);
      ids.push_back((t + 1 + t / kExperts) % kExperts);
    }
    for (float& w : weights) w = 0.3f + 0.2f * w;
    for (int e = 0; e < kExperts; ++e) {
      for (int i = 0; i < kTokens * kChosen; ++i) {
        if (ids[static_cast<size_t>(i)] != e) continue;
        token.push_back(i / kChosen);
        expert.push_back(e);
        choice.push_back(i);
      }
    }
  }
  int rows() const { return static_cast<int>(token.size()); }
  float weight(int row) const { return weights[static_cast<size_t>(choice[static_cast<size_t>(row)])]; }

  Values Dispatched(bool weighed = false) const {
    Values out;
    for (int r = 0; r < rows(); ++r) {
      for (int c = 0; c < kIn; ++c)
        out.push_back(post_norm[static_cast<size_t>(token[static_cast<size_t>(r)] * kIn + c)] *
                      (weighed ? weight(r) : 1));
    }
    return out;
  }
  // Row r times the matrix of expert `of(r)`, each element's scale and bias from elsewhere.
  Values Product(const Values& x, const Values& w, const Values& b) const {
    Values out;
    for (int r = 0; r < rows(); ++r) {
      const int e = expert[static_cast<size_t>(r)];
      for (int o = 0; o < kWide; ++o) {
        double sum = b.empty() ? 0 : double{b[static_cast<size_t>(e * kWide + o)]};
        for (int c = 0; c < kIn; ++c)
          sum +=
              double{x[static_cast<size_t>(r * kIn + c)]} * double{w[static_cast<size_t>((e * kWide + o) * kIn + c)]};
        out.push_back(static_cast<float>(sum));
      }
    }
    return out;
  }
  void RecordRouting(SmallTrace& t, std::string_view on_input = "0") const {
    const std::vector<RowRun> run = {{t.Request(std::vector<int64_t>(kTokens, 5)), 0, kTokens, 0, false}};
    t.Record("layers.0.post_norm", "T h", {kTokens, kIn}, post_norm, {.rows = run});
    t.Record("layers.0.moe.topk_ids", "T k", {kTokens, kChosen}, ids, {.rows = run});
    t.Record("layers.0.moe.topk_weights", "T k", {kTokens, kChosen}, weights,
             {.rows = run, .meta = {{"weight_on_input", on_input}}});
  }
  void RecordWeights(SmallTrace& t, bool with_bias) const {
    t.Record("layers.0.mlp.experts.gate_up_proj", "E f2 h", {kExperts, kWide, kIn}, matrix, {.phase = Phase::kLoad});
    if (with_bias)
      t.Record("layers.0.mlp.experts.gate_up_proj_bias", "E f2", {kExperts, kWide}, bias, {.phase = Phase::kLoad});
  }
};

// ---- combine weights on the inputs ----

enum class In { kDispatched, kProduct, kNeither, kBoth };
CheckResult WeightsOnInput(In held, std::string_view declared = "1") {
  const Mixture m;
  SmallTrace t;
  m.RecordWeights(t, false);
  m.RecordRouting(t, declared);
  const Values sent = m.Dispatched(held == In::kDispatched || held == In::kBoth);
  t.Record("layers.0.moe.dispatched", "R h", {m.rows(), kIn}, sent);
  Values taken = sent;
  for (size_t i = 0; i < taken.size(); ++i) {
    if (held == In::kProduct || held == In::kBoth) taken[i] *= m.weight(static_cast<int>(i / kIn));
  }
  t.Record("layers.0.moe.gate_up", "R f2", {m.rows(), kWide}, m.Product(taken, m.matrix, {}));
  return Judge(t, {"experts"});
}

TEST(CheckExperts, WeightsInTheRowsSentOrInTheProductAreRuledOut) {
  EXPECT_RULED_OUT(WeightsOnInput(In::kDispatched));
  EXPECT_RULED_OUT(WeightsOnInput(In::kProduct));
  EXPECT_RULED_OUT(WeightsOnInput(In::kNeither, "0"));
}
TEST(CheckExperts, WeightsThatDoNotReachTheInputsAreNamed) {
  ExpectNamed(WeightsOnInput(In::kNeither), "layers.0.moe.gate_up", "MOE-ROUTE");
}
TEST(CheckExperts, WeightsInTheRowsSentAndInTheProductAreNamed) {
  ExpectNamed(WeightsOnInput(In::kBoth), "layers.0.moe.gate_up", "MOE-ROUTE");
}
TEST(CheckExperts, WeightsOnInputsThatAreForTheResultsAreNamed) {
  ExpectNamed(WeightsOnInput(In::kProduct, "0"), "layers.0.moe.gate_up", "MOE-ROUTE");
  ExpectNamed(WeightsOnInput(In::kDispatched, "0"), "layers.0.moe.dispatched", "MOE-ROUTE");
}

// ---- the first product ----

// `change` makes the matrix and the bias that the kernel has.
CheckResult FirstProduct(const std::function<void(Values& w, Values& b)>& change) {
  const Mixture m;
  SmallTrace t;
  m.RecordWeights(t, true);
  m.RecordRouting(t);
  t.Record("layers.0.moe.dispatched", "R h", {m.rows(), kIn}, m.Dispatched());
  Values w = m.matrix, b = m.bias;
  change(w, b);
  t.Record("layers.0.moe.gate_up", "R f2", {m.rows(), kWide}, m.Product(m.Dispatched(), w, b));
  return Judge(t, {"experts"});
}

TEST(CheckExperts, ProductsOfTheRecordedWeightsAreRuledOut) {
  EXPECT_RULED_OUT(FirstProduct([](Values&, Values&) {}));
}
TEST(CheckExperts, BiasInTheOtherOrderIsALayout) {
  const CheckResult r = FirstProduct([](Values&, Values& b) {
    const Values from = b;
    for (size_t i = 0; i < b.size(); ++i) {
      const size_t e = i / kWide, c = i % kWide;
      b[i] = from[e * kWide + c % 2 * kHalf + c / 2];
    }
  });
  ExpectNamed(r, "layers.0.moe.gate_up", "MOE-LAYOUT");
  EXPECT_NE(r.findings[0].evidence[0].find("bias"), std::string::npos);
}
TEST(CheckExperts, BiasesOfTheNextExpertAreNamed) {
  ExpectNamed(FirstProduct([](Values&, Values& b) { std::rotate(b.begin(), b.begin() + kWide, b.end()); }),
              "layers.0.moe.gate_up", "MOE-ROUTE");
}
TEST(CheckExperts, RowsOfOneExpertInBlocksAreALayoutOfIt) {
  const CheckResult r = FirstProduct([](Values& w, Values& b) {
    const Values matrix = w, bias = b;
    for (int o = 0; o < kWide; ++o) {  // blocks of 4
      const int from = o / 4 % 2 * kHalf + o / 8 * 4 + o % 4;
      b[static_cast<size_t>(2 * kWide + o)] = bias[static_cast<size_t>(2 * kWide + from)];
      std::copy_n(matrix.begin() + (2 * kWide + from) * kIn, kIn, w.begin() + (2 * kWide + o) * kIn);
    }
  });
  ExpectNamed(r, "layers.0.moe.gate_up", "MOE-LAYOUT");
  EXPECT_NE(r.findings[0].evidence[0].find("expert 2 alone"), std::string::npos) << r.findings[0].evidence[0];
}
TEST(CheckExperts, OneExpertsScaleIsAConstantOfItsRows) {
  const CheckResult r = FirstProduct([](Values& w, Values& b) {
    for (int i = 0; i < kWide * kIn; ++i) w[static_cast<size_t>(kWide * kIn + i)] *= 1.5f;
    for (int i = 0; i < kWide; ++i) b[static_cast<size_t>(kWide + i)] *= 1.5f;
  });
  ExpectNamed(r, "layers.0.moe.gate_up", "SCALE");
  EXPECT_NE(r.findings[0].evidence[0].find("expert 1 alone"), std::string::npos) << r.findings[0].evidence[0];
}

// ---- the activation ----

// Rows of `swapped` have up where gate belongs; block: of gate and up in turn as the kernel takes them.
CheckResult Activation(int swapped, int block) {
  const Mixture m;
  SmallTrace t;
  m.RecordRouting(t);
  const Values both = m.Product(m.Dispatched(), m.matrix, m.bias);
  Values act;
  for (int r = 0; r < m.rows(); ++r) {
    for (int i = 0; i < kHalf; ++i) {
      const int at = r * kWide + i / block * 2 * block + i % block;
      float gate = both[static_cast<size_t>(at)], up = both[static_cast<size_t>(at + block)];
      if (m.expert[static_cast<size_t>(r)] == swapped) std::swap(gate, up);
      act.push_back(gate / (1 + std::exp(-gate)) * up);
    }
  }
  t.Record("layers.0.moe.gate_up", "R f2", {m.rows(), kWide}, both);
  t.Record("layers.0.moe.act", "R f", {m.rows(), kHalf}, act, {.meta = {{"activation", "silu"}}});
  return Judge(t, {"experts"});
}

TEST(CheckExperts, HalvesOfAllExpertsAreRuledOut) {
  const CheckResult r = Activation(-1, kHalf);
  EXPECT_TRUE(r.findings.empty());
}
TEST(CheckExperts, OneExpertWithUpInFrontIsNamed) {
  const CheckResult r = Activation(3, kHalf);
  ExpectNamed(r, "layers.0.moe.act", "MOE-LAYOUT");
  EXPECT_NE(r.findings[0].evidence[0].find("expert 3 alone"), std::string::npos) << r.findings[0].evidence[0];
}
TEST(CheckExperts, GateAndUpInBlocksAreALayout) {
  for (int block : {1, 2, 4}) ExpectNamed(Activation(-1, block), "layers.0.moe.act", "MOE-LAYOUT");
}

// ---- codes ----

enum class Codes { kApart, kTogether };
// Codes of each expert with one scale for gate and one for up; expert e is computed with the scales of `of(e)`.
CheckResult Quantised(Codes form, const std::function<int(int)>& of, float gate_up = 1) {
  Mixture m;
  SmallTrace t;
  std::vector<int8_t> codes;
  for (float x : m.matrix) codes.push_back(static_cast<int8_t>(std::lround(double{x} * 120)));
  Values scales = {0.011f, 0.007f, 0.013f, 0.005f, 0.009f, 0.016f, 0.012f, 0.008f};
  constexpr int kPart = kHalf * kIn;
  for (int e = 0; e < kExperts; ++e) {
    for (int part : {0, 1}) {
      const float used = scales[static_cast<size_t>(2 * of(e) + part)] * (part == 0 ? gate_up : 1);
      for (int i = 0; i < kPart; ++i) {
        const auto at = static_cast<size_t>((2 * e + part) * kPart + i);
        m.matrix[at] = static_cast<float>(codes[at]) * used;
      }
      if (form == Codes::kTogether) continue;
      const std::string name =
          "layers.0.mlp.experts." + std::to_string(e) + (part == 0 ? ".gate_proj.weight" : ".up_proj.weight");
      const auto begin = codes.begin() + (2 * e + part) * kPart;
      t.Record(name + ".codes", "N K", {kHalf, kIn}, std::vector<int8_t>(begin, begin + kPart),
               {.phase = Phase::kLoad, .meta = {{"quant", "int8_tensor"}}});
      t.Record(name + ".scale", "one", {1}, Values{scales[static_cast<size_t>(2 * e + part)]}, {.phase = Phase::kLoad});
    }
  }
  if (form == Codes::kTogether) {
    Values rows;
    for (float scale : scales) rows.insert(rows.end(), kHalf, scale);
    t.Record("layers.0.mlp.experts.gate_up_proj.codes", "E N K", {kExperts, kWide, kIn}, codes,
             {.phase = Phase::kLoad, .meta = {{"quant", "int8_channel"}}});
    t.Record("layers.0.mlp.experts.gate_up_proj.scale", "E N", {kExperts, kWide}, rows, {.phase = Phase::kLoad});
  }
  m.RecordRouting(t);
  t.Record("layers.0.moe.dispatched", "R h", {m.rows(), kIn}, m.Dispatched());
  t.Record("layers.0.moe.gate_up", "R f2", {m.rows(), kWide}, m.Product(m.Dispatched(), m.matrix, {}));
  return Judge(t, {"experts"});
}

TEST(CheckExperts, CodesUnderTheirScalesAreRuledOut) {
  for (Codes form : {Codes::kApart, Codes::kTogether}) EXPECT_RULED_OUT(Quantised(form, [](int e) { return e; }));
}
TEST(CheckExperts, ScalesOfOtherExpertsAreNamed) {
  for (Codes form : {Codes::kApart, Codes::kTogether}) {
    const CheckResult all = Quantised(form, [](int) { return 0; });
    ExpectNamed(all, "layers.0.moe.gate_up", "Q-SCALE");
    EXPECT_NE(all.findings[0].evidence[0].find("2 takes those of 0"), std::string::npos) << all.findings[0].evidence[0];
    ExpectNamed(Quantised(form, [](int e) { return e == 3 ? 1 : e; }), "layers.0.moe.gate_up", "Q-SCALE");
  }
}
TEST(CheckExperts, OneScaleOffInAllExpertsIsNamed) {
  ExpectNamed(Quantised(
                  Codes::kApart, [](int e) { return e; }, 1.75f),
              "layers.0.moe.gate_up", "Q-SCALE");
}

// ---- the shared expert ----

// factor: of the result; swapped: the activation is on up; gated: a sigmoid of the rows multiplies the result.
CheckResult SharedExpert(float factor, bool swapped = false, bool gated = false, bool gate_recorded = true) {
  const Mixture m;
  SmallTrace t;
  const Values gate = Noise(kHalf * kIn, 21), up = Noise(kHalf * kIn, 22), down = Noise(kIn * kHalf, 23),
               scalar = Noise(kIn, 24);
  const Put load{.phase = Phase::kLoad};
  t.Record("layers.0.mlp.shared_expert.gate_proj.weight", "f h", {kHalf, kIn}, gate, load);
  t.Record("layers.0.mlp.shared_expert.up_proj.weight", "f h", {kHalf, kIn}, up, load);
  t.Record("layers.0.mlp.shared_expert.down_proj.weight", "h f", {kIn, kHalf}, down, load);
  if (gated && gate_recorded) t.Record("layers.0.mlp.shared_expert_gate.weight", "1 h", {1, kIn}, scalar, load);
  const std::vector<RowRun> run = {{t.Request(std::vector<int64_t>(kTokens, 5)), 0, kTokens, 0, false}};
  t.Record("layers.0.post_norm", "T h", {kTokens, kIn}, m.post_norm, {.rows = run});
  const auto dot = [&](const Values& w, int row, const float* x, int n) {
    double sum = 0;
    for (int c = 0; c < n; ++c) sum += double{w[static_cast<size_t>(row * n + c)]} * double{x[c]};
    return static_cast<float>(sum);
  };
  Values out;
  for (int r = 0; r < kTokens; ++r) {
    const float* x = m.post_norm.data() + r * kIn;
    float middle[kHalf];
    for (int j = 0; j < kHalf; ++j) {
      const float a = dot(swapped ? up : gate, j, x, kIn), b = dot(swapped ? gate : up, j, x, kIn);
      middle[j] = a / (1 + std::exp(-a)) * b;
    }
    const float weight = gated ? 1 / (1 + std::exp(-dot(scalar, 0, x, kIn))) : 1;
    for (int c = 0; c < kIn; ++c) out.push_back(factor * weight * dot(down, c, middle, kHalf));
  }
  t.Record("layers.0.moe.shared", "T h", {kTokens, kIn}, out, {.rows = run});
  return Judge(t, {"experts"});
}

TEST(CheckExperts, SharedExpertOfItsWeightsIsRuledOut) {
  EXPECT_RULED_OUT(SharedExpert(1));
  EXPECT_RULED_OUT(SharedExpert(1, false, true));
}
TEST(CheckExperts, ConstantOnTheSharedExpertIsNamed) {
  const CheckResult r = SharedExpert(1.01f);
  ExpectNamed(r, "layers.0.moe.shared", "SCALE");
  EXPECT_NEAR(r.findings[0].constant_value, 1.01, 1e-3);
}
TEST(CheckExperts, UpInPlaceOfGateOfTheSharedExpertIsNamed) {
  ExpectNamed(SharedExpert(1, true), "layers.0.moe.shared", "MOE-LAYOUT");
}
TEST(CheckExperts, GateOfTheSharedExpertThatWasNotRecordedIsNotTestable) {
  EXPECT_TRUE(SharedExpert(1, false, true, false).findings.empty());
}

// ---- the choice ----

// Logits are the first columns of wider rows; the kernel takes their rows `pitch` apart.
CheckResult ChoiceByPitch(int pitch) {
  constexpr int kN = 10, kPadded = kN + 3;
  const Values storage = Noise(kTokens * kPadded, 9);
  SmallTrace t;
  const std::vector<RowRun> run = {{t.Request(std::vector<int64_t>(kTokens, 5)), 0, kTokens, 0, false}};
  std::vector<int64_t> ids;
  for (int r = 0; r < kTokens; ++r) {
    const auto row = storage.begin() + r * pitch;
    std::vector<int64_t> order(kN);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return row[a] > row[b]; });
    ids.insert(ids.end(), order.begin(), order.begin() + 3);
  }
  t.Record("layers.0.moe.router_logits.storage", "n", {kTokens * kPadded}, storage, {.address = 4096});
  t.Record("layers.0.moe.router_logits", "T E", {kTokens, kN}, storage,
           {.rows = run, .address = 4096, .strides = {kPadded, 1}});
  t.Record("layers.0.moe.topk_ids", "T k", {kTokens, 3}, ids, {.rows = run});
  return Judge(t, {"router"});
}

TEST(CheckRouter, ChoiceFromPackedRowsOfPaddedLogitsIsAStride) {
  ExpectNamed(ChoiceByPitch(10), "layers.0.moe.topk_ids", "STRIDE");
}
TEST(CheckRouter, ChoiceFromRowsOfAViewIsRuledOut) { EXPECT_RULED_OUT(ChoiceByPitch(13)); }

}  // namespace
}  // namespace assay
