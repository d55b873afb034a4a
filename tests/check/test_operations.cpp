// Each check of a single operation (src/check/op_*.cpp) on a small recording of it: right, and wrong in one way. The
// results are computed here, in plain loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>

#include "check/check.h"
#include "small_trace.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::Judge;
using testing::Noise;
using testing::Put;
using testing::SmallTrace;
using Values = std::vector<float>;

const Put kLoad{.step = -1, .phase = Phase::kLoad};

// Two requests of 4 and 3 tokens, in one step.
constexpr size_t kRows = 7;
Put TwoRequests(SmallTrace& t) {
  const uint64_t a = t.Request({1, 2, 3, 4}), b = t.Request({5, 6, 7});
  return {.rows = {{a, 0, 4, 0, false}, {b, 4, 3, 0, false}}};
}
int64_t PositionOf(size_t row) { return static_cast<int64_t>(row < 4 ? row : row - 4); }

Put With(Put put, std::vector<std::pair<std::string_view, std::string_view>> meta) {
  put.meta = std::move(meta);
  return put;
}

// x [rows, in] times w [out, in], plus bias.
Values Linear(const Values& x, const Values& w, size_t in, const Values& bias = {}) {
  const size_t rows = x.size() / in, out = w.size() / in;
  Values y(rows * out);
  for (size_t r = 0; r < rows; ++r) {
    for (size_t o = 0; o < out; ++o) {
      double sum = bias.empty() ? 0 : double{bias[o]};
      for (size_t c = 0; c < in; ++c) sum += double{x[r * in + c]} * double{w[o * in + c]};
      y[r * out + o] = static_cast<float>(sum);
    }
  }
  return y;
}

// Rows of x [t, heads, d] turned by their positions, theta 10000.
Values Rotated(const Values& x, size_t heads, size_t d, bool interleaved) {
  Values y = x;
  for (size_t r = 0; r < x.size() / (heads * d); ++r) {
    for (size_t h = 0; h < heads; ++h) {
      for (size_t i = 0; i < d / 2; ++i) {
        const double angle = static_cast<double>(PositionOf(r)) *
                             std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(d));
        const size_t base = (r * heads + h) * d;
        const size_t first = base + (interleaved ? 2 * i : i), second = base + (interleaved ? 2 * i + 1 : i + d / 2);
        y[first] = static_cast<float>(double{x[first]} * std::cos(angle) - double{x[second]} * std::sin(angle));
        y[second] = static_cast<float>(double{x[second]} * std::cos(angle) + double{x[first]} * std::sin(angle));
      }
    }
  }
  return y;
}

// One head; queries, keys and values [n, d] of one request over keys [begin, end) up to the query's own. lse: natural.
void Attend(const Values& q, const Values& k, const Values& v, size_t d, double scale, size_t begin, size_t end,
            Values* out, Values* lse) {
  const size_t n = q.size() / d;
  out->assign(n * d, 0);
  lse->assign(n, -INFINITY);
  for (size_t t = 0; t < n; ++t) {
    double total = 0;
    std::vector<double> sum(d, 0);
    for (size_t j = begin; j < std::min(end, t + 1); ++j) {
      double score = 0;
      for (size_t c = 0; c < d; ++c) score += double{q[t * d + c]} * double{k[j * d + c]};
      const double e = std::exp(score * scale);
      total += e;
      for (size_t c = 0; c < d; ++c) sum[c] += e * double{v[j * d + c]};
    }
    if (total == 0) continue;
    for (size_t c = 0; c < d; ++c) (*out)[t * d + c] = static_cast<float>(sum[c] / total);
    (*lse)[t] = static_cast<float>(std::log(total));
  }
}

double Silu(double x) { return x / (1 + std::exp(-x)); }

struct Operation {
  const char* name;
  const char* check;
  const char* first_bad;
  const char* cls;
  std::function<void(SmallTrace&, bool bad)> record;
};

const Operation kOperations[] = {
    {"LinearWithoutItsBias", "linear", "layers.0.mlp.down", "KERNEL",
     [](SmallTrace& t, bool bad) {
       const Put rows = TwoRequests(t);
       const Values x = Noise(kRows * 6, 1), w = Noise(5 * 6, 2), bias = Noise(5, 3);
       t.Record("layers.0.mlp.down_proj.weight", "out in", {5, 6}, w, kLoad);
       t.Record("layers.0.mlp.down_proj.bias", "out", {5}, bias, kLoad);
       t.Record("layers.0.mlp.act", "T f", {kRows, 6}, x, rows);
       t.Record("layers.0.mlp.down", "T h", {kRows, 5}, Linear(x, w, 6, bad ? Values{} : bias), rows);
     }},
    {"NormThatDoesNotUseItsWeight", "norms", "layers.0.input_norm", "LOAD",
     [](SmallTrace& t, bool bad) {
       const Put rows = With(TwoRequests(t), {{"eps", "1e-6"}});
       const Values x = Noise(kRows * 8, 1);
       Values w = Noise(8, 2), y(x.size());
       for (float& v : w) v += 2;
       for (size_t r = 0; r < kRows; ++r) {
         double square = 0;
         for (size_t c = 0; c < 8; ++c) square += double{x[r * 8 + c]} * double{x[r * 8 + c]};
         for (size_t c = 0; c < 8; ++c)
           y[r * 8 + c] =
               static_cast<float>(double{x[r * 8 + c]} / std::sqrt(square / 8 + 1e-6) * (bad ? 1.0 : double{w[c]}));
       }
       t.Record("layers.0.input_layernorm.weight", "h", {8}, w, kLoad);
       t.Record("embed", "T h", {kRows, 8}, x, rows);
       t.Record("layers.0.input_norm", "T h", {kRows, 8}, y, rows);
     }},
    {"RotationWithTheOtherPairing", "rotation", "layers.0.attn.q", "ROPE-FORM",
     [](SmallTrace& t, bool bad) {
       const Put rows = With(TwoRequests(t), {{"rope.theta", "10000"}, {"rope.pairing", "half"}});
       const Values x = Noise(kRows * 2 * 8, 1);
       t.Record("layers.0.attn.q_proj", "T H d", {kRows, 2, 8}, x, rows);
       t.Record("layers.0.attn.q", "T H d", {kRows, 2, 8}, Rotated(x, 2, 8, bad), rows);
     }},
    {"HeadsThatArePartsInTheOtherOrder", "joined-heads", "layers.0.attn.q", "STRIDE",
     [](SmallTrace& t, bool bad) {
       const Put rows = TwoRequests(t);
       const Values nope = Noise(kRows * 2 * 4, 1), pe = Noise(kRows * 2 * 4, 2);
       Values q;
       for (size_t i = 0; i < kRows * 2; ++i) {
         for (const Values* part : {bad ? &pe : &nope, bad ? &nope : &pe})
           q.insert(q.end(), part->begin() + static_cast<int64_t>(i * 4),
                    part->begin() + static_cast<int64_t>(i * 4 + 4));
       }
       t.Record("layers.0.attn.q_nope", "T H dn", {kRows, 2, 4}, nope, rows);
       t.Record("layers.0.attn.q_pe", "T H dr", {kRows, 2, 4}, pe, rows);
       t.Record("layers.0.attn.q", "T H d", {kRows, 2, 8}, q, rows);
     }},
    {"AttentionWithTwiceTheScale", "attention", "layers.0.attn.out", "SCALE",
     [](SmallTrace& t, bool bad) {
       const uint64_t a = t.Request({1, 2, 3, 4, 5, 6, 7, 8, 9});
       const Put rows = With({.rows = {{a, 0, 9, 0, false}}}, {{"softmax_scale", "0.5"}});
       const Values q = Noise(36, 1), k = Noise(36, 2), v = Noise(36, 3);
       Values out, lse;
       Attend(q, k, v, 4, bad ? 1.0 : 0.5, 0, 9, &out, &lse);
       t.Record("layers.0.attn.q", "T H d", {9, 1, 4}, q, rows);
       t.Record("layers.0.attn.k", "T H d", {9, 1, 4}, k, rows);
       t.Record("layers.0.attn.v", "T H d", {9, 1, 4}, v, rows);
       t.Record("layers.0.attn.out", "T H dv", {9, 1, 4}, out, rows);
     }},
    {"MergeByPowersOfTwo", "chunks", "layers.0.attn.out", "LSE",
     [](SmallTrace& t, bool bad) {
       const uint64_t a = t.Request({1, 2, 3, 4, 5, 6, 7, 8, 9});
       const Put rows = With({.rows = {{a, 0, 9, 0, false}}}, {{"softmax_scale", "0.5"}});
       const Values q = Noise(36, 1), k = Noise(36, 2), v = Noise(36, 3);
       Values out[2], lse[2], merged(36, 0);
       Attend(q, k, v, 4, 0.5, 0, 4, &out[0], &lse[0]);
       Attend(q, k, v, 4, 0.5, 4, 9, &out[1], &lse[1]);
       for (size_t r = 0; r < 9; ++r) {
         const double base = bad ? 2.0 : std::exp(1.0);
         const double p = std::pow(base, double{lse[0][r]}), s = std::pow(base, double{lse[1][r]});
         for (size_t i = r * 4; i < r * 4 + 4; ++i)
           merged[i] = static_cast<float>((p * double{out[0][i]} + s * double{out[1][i]}) / (p + s));
       }
       t.Record("layers.0.attn.q", "T H d", {9, 1, 4}, q, rows);
       t.Record("layers.0.attn.k", "T H d", {9, 1, 4}, k, rows);
       t.Record("layers.0.attn.v", "T H d", {9, 1, 4}, v, rows);
       for (size_t j = 0; j < 2; ++j) {
         const std::string name = "layers.0.attn.chunk." + std::to_string(j);
         const Put chunk = With(rows, {{"softmax_scale", "0.5"}, {"keys", j == 0 ? "0:4" : "4:9"}});
         t.Record(name + ".out", "T H dv", {9, 1, 4}, out[j], chunk);
         t.Record(name + ".lse", "T H", {9, 1}, lse[j], chunk);
       }
       t.Record("layers.0.attn.out", "T H dv", {9, 1, 4}, merged, rows);
     }},
    {"CacheRowsOfTheNextPosition", "cache-write", "layers.0.attn.kv_write", "KV-IDENT",
     [](SmallTrace& t, bool bad) {
       const Put rows = TwoRequests(t);
       const Values k = Noise(kRows * 4, 1), v = Noise(kRows * 4, 2);
       Values both;
       for (size_t r = 0; r < kRows; ++r) {
         const auto from = static_cast<int64_t>(bad && r >= 1 && r < 3 ? r + 1 : r);
         both.insert(both.end(), k.begin() + from * 4, k.begin() + from * 4 + 4);
         both.insert(both.end(), v.begin() + from * 4, v.begin() + from * 4 + 4);
       }
       t.Record("layers.0.attn.k", "T Hkv d", {kRows, 1, 4}, k, rows);
       t.Record("layers.0.attn.v", "T Hkv dv", {kRows, 1, 4}, v, rows);
       t.Record("layers.0.attn.kv_write", "T Hkv d+dv", {kRows, 1, 8}, both, rows);
     }},
    {"GatheredRowsOfTheNextPosition", "cache-read", "layers.0.attn.k_read", "KV-IDENT",
     [](SmallTrace& t, bool bad) {
       Put rows = TwoRequests(t);
       const Values k = Noise(kRows * 4, 1);
       Values read = k;
       if (bad) std::copy_n(k.begin() + 8, 8, read.begin() + 4);
       t.Record("layers.0.attn.k", "T Hkv d", {kRows, 1, 4}, k, rows);
       rows.step = 1;
       t.Record("layers.0.attn.k_read", "T Hkv d", {kRows, 1, 4}, read, rows);
     }},
    {"SharedExpertAddedTwice", "reductions", "layers.0.moe.out", "REDUCE",
     [](SmallTrace& t, bool bad) {
       const Put rows = With(TwoRequests(t), {{"world_size", "2"}});
       const Values routed = Noise(kRows * 6, 1), shared = Noise(kRows * 6, 2);
       Values out = routed;
       for (size_t i = 0; i < out.size(); ++i) out[i] += (bad ? 2.0f : 1.0f) * shared[i];
       t.Record("layers.0.moe.routed", "T h", {kRows, 6}, routed, rows);
       t.Record("layers.0.moe.shared", "T h", {kRows, 6}, shared, rows);
       t.Record("layers.0.moe.out", "T h", {kRows, 6}, out, rows);
     }},
    {"WeightsOfExpertsThatDoNotSumToOne", "router", "layers.0.moe.topk_weights", "MOE-ROUTE",
     [](SmallTrace& t, bool bad) {
       const Put rows = With(TwoRequests(t), {{"scoring", "softmax"}, {"renormalise", "1"}});
       const Values logits = Noise(kRows * 5, 1);
       std::vector<int64_t> ids;
       Values weights;
       for (size_t r = 0; r < kRows; ++r) {
         std::vector<size_t> order = {0, 1, 2, 3, 4};
         std::sort(order.begin(), order.end(),
                   [&](size_t x, size_t y) { return logits[r * 5 + x] > logits[r * 5 + y]; });
         double total = 0, chosen = 0;
         for (size_t e = 0; e < 5; ++e) total += std::exp(double{logits[r * 5 + e]});
         for (size_t j = 0; j < 2; ++j) chosen += std::exp(double{logits[r * 5 + order[j]]});
         for (size_t j = 0; j < 2; ++j) {
           ids.push_back(static_cast<int64_t>(order[j]));
           weights.push_back(static_cast<float>(std::exp(double{logits[r * 5 + order[j]]}) / (bad ? total : chosen)));
         }
       }
       t.Record("layers.0.moe.router_logits", "T E", {kRows, 5}, logits, rows);
       t.Record("layers.0.moe.topk_ids", "T k", {kRows, 2}, ids, rows);
       t.Record("layers.0.moe.topk_weights", "T k", {kRows, 2}, weights, rows);
     }},
    {"GateAndUpInTurnWhereHalvesAreDeclared", "experts", "layers.0.moe.act", "MOE-LAYOUT",
     [](SmallTrace& t, bool bad) {
       const Values both = Noise(kRows * 8, 1);
       Values act;
       for (size_t r = 0; r < kRows; ++r) {
         for (size_t c = 0; c < 4; ++c) {
           const double gate = double{both[r * 8 + (bad ? 2 * c : c)]},
                        up = double{both[r * 8 + (bad ? 2 * c + 1 : c + 4)]};
           act.push_back(static_cast<float>(Silu(gate) * up));
         }
       }
       t.Record("layers.0.moe.gate_up", "R 2f", {kRows, 8}, both);
       t.Record("layers.0.moe.act", "R f", {kRows, 4}, act, {.meta = {{"activation", "silu"}}});
     }},
    {"AttentionLeftOutOfTheStream", "residual", "layers.1.out", "KERNEL",
     [](SmallTrace& t, bool bad) {
       const Put rows = TwoRequests(t);
       const Values x = Noise(kRows * 6, 1), attention = Noise(kRows * 6, 2), ffn = Noise(kRows * 6, 3);
       Values out = x;
       for (size_t i = 0; i < out.size(); ++i) out[i] += ffn[i] + (bad ? 0 : attention[i]);
       t.Record("layers.0.out", "T h", {kRows, 6}, x, rows);
       t.Record("layers.1.attn.o_proj", "T h", {kRows, 6}, attention, rows);
       t.Record("layers.1.mlp.down", "T h", {kRows, 6}, ffn, rows);
       t.Record("layers.1.out", "T h", {kRows, 6}, out, rows);
     }},
    {"EmbeddingThatIsNotScaled", "embedding", "embed", "SCALE",
     [](SmallTrace& t, bool bad) {
       const Put rows = With(TwoRequests(t), {{"embed_scale", "2.5"}});
       const Values table = Noise(8 * 6, 1);
       Values embed;
       for (size_t r = 0; r < kRows; ++r)
         for (size_t c = 0; c < 6; ++c) embed.push_back(table[(r + 1) * 6 + c] * (bad ? 1.0f : 2.5f));
       t.Record("embed_tokens.weight", "vocab h", {8, 6}, table, kLoad);
       t.Record("embed", "T h", {kRows, 6}, embed, rows);
     }},
    {"TokenThatIsNotInTheVocabulary", "tokens", "next_token", "KERNEL",
     [](SmallTrace& t, bool bad) {
       const Put rows = With(TwoRequests(t), {{"temperature", "0"}});
       const Values logits = Noise(kRows * 9, 1);
       std::vector<int64_t> token;
       for (size_t r = 0; r < kRows; ++r) {
         const auto row = logits.begin() + static_cast<int64_t>(r * 9);
         token.push_back(std::max_element(row, row + 9) - row);
       }
       if (bad) token[2] = 9;
       t.Record("logits", "T vocab", {kRows, 9}, logits, rows);
       t.Record("next_token", "T", {kRows}, token, rows);
     }},
    {"SampledTokenBehindTopK", "tokens", "next_token", "KERNEL",
     [](SmallTrace& t, bool bad) {
       const Put rows = With(TwoRequests(t), {{"temperature", "0.7"}, {"top_k", "3"}, {"top_p", "0.99"}});
       const Values logits = Noise(kRows * 9, 1);
       std::vector<int64_t> token;
       for (size_t r = 0; r < kRows; ++r) {  // the second largest, where bad the smallest
         std::vector<int64_t> order{0, 1, 2, 3, 4, 5, 6, 7, 8};
         std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
           return logits[r * 9 + static_cast<size_t>(a)] > logits[r * 9 + static_cast<size_t>(b)];
         });
         token.push_back(order[bad && r == 2 ? 8 : 1]);
       }
       t.Record("logits", "T vocab", {kRows, 9}, logits, rows);
       t.Record("next_token", "T", {kRows}, token, rows);
     }},
    {"SampledTokenBehindMinP", "tokens", "next_token", "KERNEL",
     [](SmallTrace& t, bool bad) {
       const Put rows = With(TwoRequests(t), {{"temperature", "1"}, {"min_p", "0.5"}});
       Values logits(kRows * 4, -1);
       for (size_t r = 0; r < kRows; ++r) logits[r * 4 + 1] = 0, logits[r * 4 + 2] = -0.5F;
       t.Record("logits", "T vocab", {kRows, 4}, logits, rows);
       t.Record("next_token", "T", {kRows}, std::vector<int64_t>(kRows, bad ? 3 : 2), rows);
     }},
    {"SampledTokenBehindTopPWithTheTemperatureBehindIt", "tokens", "next_token", "KERNEL",
     [](SmallTrace& t, bool bad) {  // of 0 and -1 the nucleus keeps both, unless the temperature comes first
       const Put rows = With(TwoRequests(t), {{"temperature", "0.25"}, {"top_p", "0.9"}});
       Values logits(kRows * 4, -10);
       for (size_t r = 0; r < kRows; ++r) logits[r * 4 + 1] = 0, logits[r * 4 + 2] = -1;
       t.Record("logits", "T vocab", {kRows, 4}, logits, rows);
       t.Record("next_token", "T", {kRows}, std::vector<int64_t>(kRows, bad ? 3 : 2), rows);
     }},
    {"LogSumExpHeadByHead", "attention", "layers.0.attn.lse", "LSE",
     [](SmallTrace& t, bool bad) {
       constexpr size_t n = 4, d = 8;
       const Put rows{.rows = {{t.Request({1, 2, 3, 4}), 0, n, 0, false}}};
       const Values q = Noise(2 * n * d, 1), k = Noise(n * d, 2), v = Noise(n * d, 3);
       Values out(2 * n * d), lse(2 * n), queries(2 * n * d);
       for (size_t h = 0; h < 2; ++h) {
         Values head_out, head_lse;
         const Values head(q.begin() + static_cast<int64_t>(h * n * d),
                           q.begin() + static_cast<int64_t>((h + 1) * n * d));
         Attend(head, k, v, d, 1 / std::sqrt(8.0), 0, n, &head_out, &head_lse);
         for (size_t r = 0; r < n; ++r) {
           for (size_t c = 0; c < d; ++c) {
             queries[(r * 2 + h) * d + c] = head[r * d + c];
             out[(r * 2 + h) * d + c] = head_out[r * d + c];
           }
           lse[bad ? h * n + r : r * 2 + h] = head_lse[r];
         }
       }
       t.Record("layers.0.attn.q", "T H d", {n, 2, d}, queries, rows);
       t.Record("layers.0.attn.k", "T Hkv d", {n, 1, d}, k, rows);
       t.Record("layers.0.attn.v", "T Hkv dv", {n, 1, d}, v, rows);
       t.Record("layers.0.attn.out", "T H dv", {n, 2, d}, out, rows);
       t.Record("layers.0.attn.lse", "T H", {n, 2}, lse, rows);
     }},
    {"SumOfRanksTakenTwice", "declared", "layers.0.my.result", "REDUCE",
     [](SmallTrace& t, bool bad) {
       const Put rows = TwoRequests(t);
       const Values x = Noise(kRows * 6, 1), y = Noise(kRows * 6, 2);
       Values sum = x;
       for (size_t i = 0; i < sum.size(); ++i) sum[i] = (sum[i] + y[i]) * (bad ? 2.0f : 1.0f);
       t.Record("layers.0.my.x", "T h", {kRows, 6}, x, rows);
       t.Record("layers.0.my.y", "T h", {kRows, 6}, y, rows);
       t.Record("layers.0.my.result", "T h", {kRows, 6}, sum,
                With(rows, {{"op", "sum_ranks"}, {"inputs", "layers.0.my.x,layers.0.my.y"}}));
     }},
    {"LatentQueriesTwiceAsLong", "absorption", "layers.0.attn.q_latent", "SCALE",
     [](SmallTrace& t, bool bad) {
       const Put rows = TwoRequests(t);
       const Values q = Noise(kRows * 2 * 4, 1), w = Noise(2 * 6 * 4, 2);
       Values latent;
       for (size_t i = 0; i < kRows * 2; ++i) {
         for (size_t c = 0; c < 6; ++c) {
           double sum = 0;
           for (size_t n = 0; n < 4; ++n) sum += double{q[i * 4 + n]} * double{w[((i % 2) * 6 + c) * 4 + n]};
           latent.push_back(static_cast<float>(sum * (bad ? 2 : 1)));
         }
       }
       t.Record("layers.0.attn.W_UK_T", "H c dn", {2, 6, 4}, w, kLoad);
       t.Record("layers.0.attn.q_nope", "T H dn", {kRows, 2, 4}, q, rows);
       t.Record("layers.0.attn.q_latent", "T H c", {kRows, 2, 6}, latent, rows);
     }},
    {"ScaleOfCodesHalved", "quantised-inputs", "layers.0.input_norm.q_scale", "Q-SCALE",
     [](SmallTrace& t, bool bad) {
       const Put rows = With(TwoRequests(t), {{"quant", "int8_token"}});
       const Values x = Noise(kRows * 16, 1);
       std::vector<int8_t> codes;
       Values scales;
       for (size_t r = 0; r < kRows; ++r) {
         float top = 0;
         for (size_t c = 0; c < 16; ++c) top = std::max(top, std::fabs(x[r * 16 + c]));
         for (size_t c = 0; c < 16; ++c)
           codes.push_back(static_cast<int8_t>(std::nearbyint(double{x[r * 16 + c]} * 127 / double{top})));
         scales.push_back(top / 127 * (bad ? 0.5f : 1.0f));
       }
       t.Record("layers.0.input_norm", "T h", {kRows, 16}, x, rows);
       t.Record("layers.0.input_norm.q", "T h", {kRows, 16}, codes, rows);
       t.Record("layers.0.input_norm.q_scale", "T s", {kRows, 1}, scales, rows);
     }},
};

class OperationCheck : public ::testing::TestWithParam<Operation> {
 protected:
  static CheckResult Judged(bool bad) {
    SmallTrace t;
    GetParam().record(t, bad);
    return Judge(t, {GetParam().check});
  }
};

TEST_P(OperationCheck, FaultIsNamedAndConfirmsAHypothesis) {
  const CheckResult r = Judged(true);
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].name, GetParam().first_bad);
  EXPECT_EQ(r.findings[0].cls, GetParam().cls) << r.findings[0].evidence[0];
  EXPECT_TRUE(std::any_of(r.ledger.begin(), r.ledger.end(),
                          [](const LedgerEntry& e) { return e.state == CheckState::kConfirmed; }));
}

TEST_P(OperationCheck, RightOneIsJudgedAndRuledOut) {
  const CheckResult r = Judged(false);
  EXPECT_TRUE(r.findings.empty()) << r.findings[0].name << ": " << r.findings[0].evidence[0];
  EXPECT_GT(r.coverage.results_judged, 0u);
  ASSERT_EQ(r.ledger.size(), 1u);
  EXPECT_EQ(r.ledger[0].state, CheckState::kRuledOut) << r.ledger[0].evidence[0];
}

INSTANTIATE_TEST_SUITE_P(Each, OperationCheck, ::testing::ValuesIn(kOperations),
                         [](const auto& each) { return std::string(each.param.name); });

TEST(WeightsHypothesis, ResultsThatFollowFromTheWeightsRuleItOut) {
  for (const bool bad : {false, true}) {
    SmallTrace t;
    const Put rows = TwoRequests(t);
    const Values x = Noise(kRows * 6, 1), w = Noise(5 * 6, 2);
    Values y = Linear(x, w, 6);
    if (bad) y[8] += 0.3f;  // no cause fits one element
    t.Record("layers.0.mlp.down_proj.weight", "out in", {5, 6}, w, kLoad);
    t.Record("layers.0.mlp.act", "T f", {kRows, 6}, x, rows);
    t.Record("layers.0.mlp.down", "T h", {kRows, 5}, y, rows);
    const auto capture = t.Open();
    const auto result = RunChecks(*capture, {});
    ASSERT_TRUE(result.ok());
    const auto entry = std::find_if(result->ledger.begin(), result->ledger.end(),
                                    [](const LedgerEntry& e) { return e.hypothesis == hypothesis::kWeights; });
    ASSERT_NE(entry, result->ledger.end());
    EXPECT_EQ(entry->state, bad ? CheckState::kNotTestable : CheckState::kRuledOut);
    if (!bad) {
      EXPECT_EQ(entry->evidence[0].find("linear: 1 results follow from weights"), 0u) << entry->evidence[0];
    }
  }
}

// Columns 5 to 8 of 12 are wrong in two rows: a kernel's last block.
TEST(Operations, WrongColumnsAreSaid) {
  SmallTrace t;
  const Put rows = TwoRequests(t);
  const Values x = Noise(kRows * 6, 1), w = Noise(12 * 6, 2);
  Values y = Linear(x, w, 6);
  for (size_t r : {2, 5}) {
    for (size_t c = 5; c <= 8; ++c) y[r * 12 + c] += 0.25F + static_cast<float>(c * r % 3);
  }
  t.Record("layers.0.mlp.down_proj.weight", "out in", {12, 6}, w, kLoad);
  t.Record("layers.0.mlp.act", "T f", {kRows, 6}, x, rows);
  t.Record("layers.0.mlp.down", "T h", {kRows, 12}, y, rows);
  const CheckResult r = Judge(t, {"linear"});
  ASSERT_EQ(r.findings.size(), 1U);
  EXPECT_NE(r.findings[0].evidence.back().find("2 of 7 rows, columns 5-8 of 12"), std::string::npos)
      << r.findings[0].evidence.back();
}

// Probabilities of scores over 16 e-folds; those below a threshold are zeros, or those of two columns.
CheckResult Probabilities(double threshold, bool columns) {
  constexpr int64_t kKeys = 24;
  SmallTrace t;
  const Put rows = TwoRequests(t);
  Values scores = Noise(kRows * kKeys, 1), probs;
  for (float& s : scores) s *= 8;
  for (size_t r = 0; r < kRows; ++r) {
    double total = 0;
    for (size_t c = 0; c < kKeys; ++c) total += std::exp(double{scores[r * kKeys + c]});
    for (size_t c = 0; c < kKeys; ++c) {
      const double p = std::exp(double{scores[r * kKeys + c]}) / total;
      probs.push_back(p < threshold || (columns && c < 2) ? 0.0F : static_cast<float>(p));
    }
  }
  t.Record("layers.0.attn.scores", "T H K", {kRows, 1, kKeys}, scores, rows);
  t.Record("layers.0.attn.probs", "T H K", {kRows, 1, kKeys}, probs, rows);
  return Judge(t, {"attention"});
}
TEST(Operations, NumbersBelowAThresholdThatAreZerosLeftTheRange) {
  const auto cls = [](const CheckResult& r) {
    for (const FirstBad& bad : r.findings) {
      if (bad.name == "layers.0.attn.probs") return bad.cls;
    }
    return std::string();
  };
  EXPECT_EQ(cls(Probabilities(0, false)), "");
  EXPECT_EQ(cls(Probabilities(0x1p-14, false)), "RANGE");
  EXPECT_NE(cls(Probabilities(0, true)), "RANGE");
}

}  // namespace
}  // namespace assay
