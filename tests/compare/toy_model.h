// A decoder small enough for unit tests, with real arithmetic: two layers, four heads, rotary-free attention, gated
// FFN. It records the canonical sites through the recorder. What makes two right runs differ (order of summation,
// rounding to bf16, chunks, shards) and what makes one wrong (a hook on any tensor) are its options.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "probe/recorder.h"
#include "trace/reader.h"
#include "trace/request_key.h"

namespace assay::testing {

// [rows, cols], row-major.
struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<float> v;
  Matrix() = default;
  Matrix(int64_t r, int64_t c) : rows(r), cols(c), v(static_cast<size_t>(r * c), 0.0f) {}
  float& at(int64_t r, int64_t c) { return v[static_cast<size_t>(r * cols + c)]; }
  float at(int64_t r, int64_t c) const { return v[static_cast<size_t>(r * cols + c)]; }
};

// Defaults: two requests, whole prompts, one rank, float32. Two runs with the same options are equal to the last bit.
struct ToyOptions {
  std::vector<std::vector<int64_t>> prompts = {{3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8}, {2, 7, 1, 8, 2, 8, 1, 8}};
  int64_t chunk = 0;  // prefill rows a step; 0: the whole prompt
  int decode_steps = 4;
  bool backwards = false;       // sums run from the other end: another rounding, same value
  bool bf16 = false;            // every tensor is rounded to bf16
  int ranks = 1;                // heads are recorded as that many shards, o_proj and mlp.down as partial sums
  bool partial_of_one = false;  // a rank alone records its products as partial sums too
  int first_rank = 0;           // others of a larger run recorded nothing
  int key_shards = 0;  // heads of attn.k*, and a weight of layer 0's, are recorded as that many shards, each by ranks /
                       // key_shards ranks
  bool row_grid = true;
  bool payloads = false;
  std::vector<std::string> only;  // globs of sites to record; empty: all
  std::vector<int64_t> forced;    // tokens to feed instead of the chosen ones
  // Called on each tensor before it is recorded and used. first: position of its row 0.
  std::function<void(const std::string& site, int request, int64_t first, Matrix* tensor)> fault;
  // Called on what one rank records, which nothing else reads.
  std::function<void(const std::string& site, int32_t rank, Matrix* part)> rank_fault;
};

// Computed in float by plain loops, one request after the other; weights are the same for every run (seed 11). Nothing
// is shared with the native runtime, so that the comparison is tested against an engine that it does not know.
class ToyModel {
 public:
  static constexpr int64_t kHidden = 32, kHeads = 4, kDim = 8, kFfn = 48, kVocab = 40, kLayers = 2;

  // Runs and records into dir, which is emptied first.
  static std::unique_ptr<Trace> Run(const std::string& dir, const ToyOptions& options) {
    std::filesystem::remove_all(dir);
    ToyModel(dir, options).RunAll();
    auto trace = Trace::Open(dir);
    EXPECT_TRUE(trace.ok()) << trace.status().message();
    return trace.ok() ? std::move(trace).value() : nullptr;
  }

 private:
  struct State {
    std::vector<int64_t> tokens;
    Matrix keys[kLayers], values[kLayers];
    uint64_t key = 0;
  };

  ToyModel(const std::string& dir, const ToyOptions& options) : options_(options) {
    Settings settings;
    settings.profile = "all";
    settings.dir = dir;
    settings.tokens = true;
    settings.row_grid = options.row_grid;
    if (options.payloads) settings.level = Level::kPayload;
    settings.include.patterns = options.only;
    ProcessInfo process;
    process.host = "toy";
    process.command = {"toy"};
    process.meta = {{"engine", "toy"}};
    auto recorder = Recorder::Open(settings, process);
    EXPECT_TRUE(recorder.ok()) << recorder.status().message();
    recorder_ = std::move(recorder).value();
    std::mt19937_64 random(11);
    auto weight = [&](const std::string& name, int64_t in, int64_t out) {
      std::normal_distribution<float> normal(0, 1.0f / std::sqrt(static_cast<float>(in)));
      Matrix w(in, out);
      for (float& x : w.v) x = Round(normal(random));
      weights_[name] = std::move(w);
    };
    weight("embed", 1, kVocab * kHidden);
    for (int64_t l = 0; l < kLayers; ++l) {
      const std::string p = std::to_string(l);
      for (const char* n : {"q", "k", "v", "o"}) weight(p + n, kHidden, kHidden);
      weight(p + "gate", kHidden, kFfn);
      weight(p + "up", kHidden, kFfn);
      weight(p + "down", kFfn, kHidden);
    }
    weight("head", kHidden, kVocab);
  }

  // Nearest bf16, ties to even.
  float Round(float x) const {
    if (!options_.bf16) return x;
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits += 0x7fff + ((bits >> 16) & 1);
    bits &= 0xffff0000;
    std::memcpy(&x, &bits, 4);
    return x;
  }

  template <class F>
  // Sum of f(0) to f(n - 1).
  float Sum(int64_t n, F f) const {
    float sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += f(options_.backwards ? n - 1 - i : i);
    return sum;
  }

  // x [T, in] times columns [from, to) of the input, as a rank with that share of the weight has it.
  Matrix Linear(const Matrix& x, const std::string& name, int64_t from = 0, int64_t to = -1) const {
    const Matrix& w = weights_.at(name);
    if (to < 0) to = w.rows;
    Matrix y(x.rows, w.cols);
    for (int64_t r = 0; r < x.rows; ++r) {
      for (int64_t c = 0; c < w.cols; ++c) {
        y.at(r, c) = Round(Sum(to - from, [&](int64_t k) { return x.at(r, from + k) * w.at(from + k, c); }));
      }
    }
    return y;
  }

  Matrix Norm(const Matrix& x) const {
    Matrix y(x.rows, x.cols);
    for (int64_t r = 0; r < x.rows; ++r) {
      const float mean = Sum(x.cols, [&](int64_t k) { return x.at(r, k) * x.at(r, k); }) / static_cast<float>(x.cols);
      for (int64_t c = 0; c < x.cols; ++c) y.at(r, c) = Round(x.at(r, c) / std::sqrt(mean + 1e-6f));
    }
    return y;
  }

  Matrix Add(const Matrix& a, const Matrix& b) const {
    Matrix y(a.rows, a.cols);
    for (size_t i = 0; i < y.v.size(); ++i) y.v[i] = Round(a.v[i] + b.v[i]);
    return y;
  }

  void Record(const std::string& site, const char* axes, const Matrix& m, int32_t rank, Shard shard) {
    std::vector<int64_t> shape = {m.rows, m.cols}, strides = {m.cols, 1};
    if (std::strcmp(axes, "T H d") == 0) {
      shape = {m.rows, m.cols / kDim, kDim};
      strides = {m.cols, kDim, 1};
    } else if (std::strcmp(axes, "T") == 0) {
      shape = {m.rows};
      strides = {1};
    }
    const RowRun run{state_->key, 0, m.rows, first_, false};
    Observation o;
    o.site = site;
    o.axes = axes;
    o.view = {m.v.data(), DType::kF32, shape, strides, 0};
    o.rank = options_.first_rank + rank;
    o.step = step_;
    o.phase = m.rows > 1 ? Phase::kPrefill : Phase::kDecode;
    o.compute_dtype = options_.bf16 ? DType::kBF16 : DType::kF32;
    o.runs = std::span(&run, 1);
    o.shard = shard;
    const Status status = recorder_->Record(o);
    EXPECT_TRUE(status.ok()) << site << ": " << status.message();
  }

  // A tensor as the engine goes on with it: the fault first, then every rank records its share. Heads are split over
  // the ranks; what has no heads is recorded whole by each, as a replicated tensor.
  Matrix See(const std::string& site, const char* axes, Matrix m) {
    if (options_.fault) options_.fault(site, request_, first_, &m);
    const bool heads = std::strcmp(axes, "T H d") == 0;
    const bool keys = options_.key_shards > 0 && site.find("attn.k") != std::string::npos;
    const int32_t shards = !heads ? 1 : keys ? options_.key_shards : options_.ranks;
    for (int32_t rank = 0; rank < options_.ranks; ++rank) {
      const int32_t shard = rank * shards / options_.ranks;
      const int64_t cols = m.cols / shards;
      Matrix part(m.rows, cols);
      for (int64_t r = 0; r < m.rows; ++r) {
        for (int64_t c = 0; c < cols; ++c) part.at(r, c) = m.at(r, shard * cols + c);
      }
      if (options_.rank_fault) options_.rank_fault(site, rank, &part);
      Record(site, axes, part, rank, shards == 1 ? Shard() : Shard{shard, shards, shard * cols, m.cols});
    }
    return m;
  }

  // A projection whose input columns are split over the ranks: partial results, then their sum.
  Matrix Reduced(const std::string& site, const Matrix& x, const std::string& weight) {
    if (options_.ranks == 1 && !options_.partial_of_one) return See(site, "T h", Linear(x, weight));
    const int64_t k = weights_.at(weight).rows, each = k / options_.ranks;
    Matrix sum;
    for (int32_t rank = 0; rank < options_.ranks; ++rank) {
      Matrix part = Linear(x, weight, rank * each, (rank + 1) * each);
      if (options_.fault) options_.fault(site + ".partial" + std::to_string(rank), request_, first_, &part);
      Record(site + ".partial", "T h", part, rank, Shard());
      sum = rank == 0 ? part : Add(sum, part);
    }
    return See(site, "T h", sum);
  }

  // q [T, H d] of rows first_ and following, k and v [S, H d] of all positions so far; causal, scale 1 / sqrt(d).
  Matrix Attend(const Matrix& q, const Matrix& k, const Matrix& v) const {
    Matrix out(q.rows, q.cols);
    for (int64_t r = 0; r < q.rows; ++r) {
      const int64_t n = first_ + r + 1;
      for (int64_t h = 0; h < kHeads; ++h) {
        std::vector<float> p(static_cast<size_t>(n));
        float top = -1e30f;
        for (int64_t j = 0; j < n; ++j) {
          float s = Sum(kDim, [&](int64_t d) { return q.at(r, h * kDim + d) * k.at(j, h * kDim + d); });
          p[static_cast<size_t>(j)] = s / std::sqrt(static_cast<float>(kDim));
          top = std::max(top, p[static_cast<size_t>(j)]);
        }
        for (float& x : p) x = std::exp(x - top);
        const float total = Sum(n, [&](int64_t j) { return p[static_cast<size_t>(j)]; });
        for (int64_t d = 0; d < kDim; ++d) {
          const float sum = Sum(n, [&](int64_t j) { return p[static_cast<size_t>(j)] * v.at(j, h * kDim + d); });
          out.at(r, h * kDim + d) = Round(sum / total);
        }
      }
    }
    return out;
  }

  static void Append(Matrix* cache, const Matrix& rows) {
    cache->cols = rows.cols;
    cache->rows += rows.rows;
    cache->v.insert(cache->v.end(), rows.v.begin(), rows.v.end());
  }

  // One pass over rows [first_, first_ + n) of a request; gives the token after the last row.
  int64_t Step(int64_t n) {
    Matrix x(n, kHidden);
    for (int64_t r = 0; r < n; ++r) {
      const int64_t token = state_->tokens[static_cast<size_t>(first_ + r)];
      for (int64_t c = 0; c < kHidden; ++c) {
        // A learned position would do the same: equal tokens at other positions differ.
        const auto turn = static_cast<float>((first_ + r) * (c + 1));
        x.at(r, c) = Round(weights_["embed"].v[static_cast<size_t>(token * kHidden + c)] + 0.3f * std::sin(turn));
      }
    }
    x = See("embed", "T h", x);
    for (int64_t l = 0; l < kLayers; ++l) {
      const std::string p = std::to_string(l), at = "layers." + p + ".";
      const Matrix a = See(at + "input_norm", "T h", Norm(x));
      const Matrix q = See(at + "attn.q", "T H d", See(at + "attn.q_proj", "T H d", Linear(a, p + "q")));
      const Matrix k = See(at + "attn.k", "T H d", See(at + "attn.k_proj", "T H d", Linear(a, p + "k")));
      const Matrix v = See(at + "attn.v", "T H d", See(at + "attn.v_proj", "T H d", Linear(a, p + "v")));
      Append(&state_->keys[l], k);
      Append(&state_->values[l], v);
      const Matrix o = See(at + "attn.out", "T H d", Attend(q, state_->keys[l], state_->values[l]));
      const Matrix o_proj = Reduced(at + "attn.o_proj", o, p + "o");
      const Matrix mid = Add(x, o_proj);
      const Matrix b = See(at + "post_norm", "T h", Norm(mid));
      const Matrix gate = See(at + "mlp.gate", "T f", Linear(b, p + "gate"));
      const Matrix up = See(at + "mlp.up", "T f", Linear(b, p + "up"));
      Matrix act(n, kFfn);
      for (size_t i = 0; i < act.v.size(); ++i) act.v[i] = Round(gate.v[i] / (1 + std::exp(-gate.v[i])) * up.v[i]);
      act = See(at + "mlp.act", "T f", act);
      x = See(at + "out", "T h", Add(mid, Reduced(at + "mlp.down", act, p + "down")));
    }
    const Matrix last = See("final_norm", "T h", Norm(x));
    const Matrix logits = See("logits", "T vocab", Linear(last, "head"));
    Matrix margin(n, 1), chosen(n, 1);
    int64_t next = 0;
    for (int64_t r = 0; r < n; ++r) {
      float best = -1e30f, second = -1e30f;
      for (int64_t c = 0; c < kVocab; ++c) {
        const float y = logits.at(r, c);
        if (y > best) {
          second = best;
          best = y;
          next = c;
        } else if (y > second) {
          second = y;
        }
      }
      margin.at(r, 0) = best - second;
      chosen.at(r, 0) = static_cast<float>(next);
    }
    See("next_token.margin", "T", margin);
    chosen = See("next_token", "T", chosen);
    return static_cast<int64_t>(chosen.at(n - 1, 0));
  }

  // A weight of two heads of keys: no token rows, no request.
  void RecordKeyNorm() {
    for (int32_t rank = 0; rank < options_.ranks; ++rank) {
      Matrix part(1, 2 * kDim / options_.key_shards);
      const int32_t shard = rank * options_.key_shards / options_.ranks;
      const auto first = static_cast<int64_t>(shard) * part.cols;
      for (int64_t c = 0; c < part.cols; ++c) part.at(0, c) = 1 + 0.1f * std::sin(static_cast<float>(first + c));
      const std::string site = "layers.0.attn.k_norm.weight";
      if (options_.rank_fault) options_.rank_fault(site, rank, &part);
      const std::vector<int64_t> shape = {part.cols}, strides = {1};
      Observation o;
      o.site = site;
      o.axes = "d";
      o.view = {part.v.data(), DType::kF32, shape, strides, 0};
      o.rank = options_.first_rank + rank;
      o.shard = {shard, options_.key_shards, first, 2 * kDim};
      EXPECT_TRUE(recorder_->Record(o).ok());
    }
  }

  void RunAll() {
    if (options_.key_shards > 0) RecordKeyNorm();
    for (size_t i = 0; i < options_.prompts.size(); ++i) {
      State state;
      state_ = &state;
      request_ = static_cast<int>(i);
      state.tokens = options_.prompts[i];
      state.key = RequestKey(state.tokens, 0);
      RequestInfo info;
      info.key = state.key;
      const auto prompt = static_cast<int64_t>(state.tokens.size());
      info.prompt_tokens = prompt;
      EXPECT_TRUE(recorder_->AddRequest(info).ok());
      const int64_t chunk = options_.chunk > 0 ? options_.chunk : prompt;
      int64_t next = 0;
      for (first_ = 0; first_ < prompt; first_ += chunk, ++step_) next = Step(std::min(chunk, prompt - first_));
      for (int d = 0; d < options_.decode_steps; ++d, ++step_) {
        first_ = prompt + d;
        const auto fed = static_cast<size_t>(d);
        state.tokens.push_back(fed < options_.forced.size() ? options_.forced[fed] : next);
        next = Step(1);
      }
    }
    EXPECT_TRUE(recorder_->Close().ok());
  }

  ToyOptions options_;
  std::unique_ptr<Recorder> recorder_;
  std::map<std::string, Matrix> weights_;
  State* state_ = nullptr;
  int request_ = 0;
  int64_t first_ = 0, step_ = 0;
};

}  // namespace assay::testing
