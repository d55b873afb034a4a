#include "check/op_fitted.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <vector>

#include "fit/explain.h"
#include "oracle/rope.h"

namespace assay::op {
namespace {

using oracle::Array;

constexpr int64_t kMostElements = int64_t{1} << 18;  // rows beyond them are left out of a fit
constexpr int kMostEarlier = 8;                      // earlier steps that are looked at
constexpr size_t kMostArrays = 24, kMostTerms = 6;
constexpr int kMostSearched = 8;   // events of a name
constexpr int64_t kScreened = 12;  // rows and columns of a product that are looked at first

// Judged rows of the result, from a little before the first wrong one, and what fit is given of them.
// REQUIRES of users: Connect() after the last Add, before the fit, and no Add behind it. Not copyable: the problem
// points into it.
class Rows {
 public:
  Rows(const Subject& s, const oracle::Computed& right) : s_(s) {
    const Array& have = s.actual();
    const auto n = static_cast<int64_t>(s.judged().size());
    width_ = have.size() / std::max<int64_t>(n, 1);
    if (width_ == 0 || right.value.size() != have.size()) return;
    const Difference d = Differ(s, right);
    // A quarter of the rows lies before the first wrong one: right rows are what an explanation must not break.
    const int64_t first = d.rows.empty() ? 0 : d.rows.front();
    const int64_t most = std::max<int64_t>(kMostElements / width_, 1), begin = first < most ? 0 : first - most / 4;
    for (int64_t r = begin; r < n && static_cast<int64_t>(rows_.size()) < most; ++r) {
      if (s.judged()[static_cast<size_t>(r)]) rows_.push_back(r);
    }
    problem_.rows = static_cast<int64_t>(rows_.size());
    problem_.heads = have.rank() == 3 ? std::max<int64_t>(have.shape[1], 1) : 1;
    problem_.cols = width_ / problem_.heads;
    actual_ = Take(have.values);
    expected_ = Take(right.value.values);
    bound_ = Bounds(right);
    problem_.actual = actual_;
    problem_.expected = expected_;
    problem_.bound = bound_;
  }
  Rows(const Rows&) = delete;

  bool usable() const { return problem_.rows > 0 && problem_.cols > 0; }
  fit::Problem& problem() { return problem_; }
  int64_t width() const { return width_; }

  std::vector<double> Take(std::span<const double> values) const {
    std::vector<double> out;
    out.reserve(rows_.size() * static_cast<size_t>(width_));
    for (int64_t r : rows_) {
      const auto row = values.subspan(static_cast<size_t>(r * width_), static_cast<size_t>(width_));
      out.insert(out.end(), row.begin(), row.end());
    }
    return out;
  }
  // What each element of the chosen rows may be off by the declared precision; 0 where no bound can be stated.
  std::vector<double> Bounds(const oracle::Computed& computed) const {
    std::vector<double> out;
    const oracle::Precision p = s_.precision();
    for (int64_t r : rows_) {
      for (int64_t i = r * width_; i < (r + 1) * width_; ++i) {
        const double b = Allowed(computed, i, p, s_.one_store);
        out.push_back(std::isfinite(b) ? b : 0);
      }
    }
    return out;
  }
  // The array stays where it is until the fit is done.
  fit::NamedArray& Add(std::string name, std::vector<double> values) {
    kept_.push_back(std::move(values));
    problem_.arrays.push_back({std::move(name), {}});
    return problem_.arrays.back();
  }
  void Connect() {
    for (size_t i = 0; i < kept_.size(); ++i) problem_.arrays[i].values = kept_[i];
  }

 private:
  const Subject& s_;
  int64_t width_ = 0;
  std::vector<int64_t> rows_;
  std::vector<double> actual_, expected_, bound_;
  std::vector<std::vector<double>> kept_;
  fit::Problem problem_;
};

std::string ResidualText(const fit::Explanation& found, const fit::Answer& answer) {
  char text[160];
  std::snprintf(text, sizeof text, "residual %.2g (%.2g without), %.0f bits beyond chance", found.residual,
                answer.residual, found.significance);
  return text;
}

// Numbers that a constant may be named by. A result of several heads has rows of `heads` times `cols` elements.
// Only numbers that belong to the model or the run: each further one makes it likelier that a constant has a name by
// chance.
std::vector<fit::NamedNumber> NumbersOf(const Subject& s, int64_t heads, int64_t cols) {
  std::vector<fit::NamedNumber> numbers;
  const auto add = [&](std::string name, double value) {
    if (std::isfinite(value) && value != 0 && value != 1) numbers.push_back({std::move(name), value});
  };
  add("ranks", static_cast<double>(s.capture().world_size()));
  // Attention divides by the root of the query's head size, which may differ from that of its result.
  const std::string query = s.Sibling("attn.q");
  if (const auto q = s.info().name != query ? s.capture().Operand(s.info(), query) : std::nullopt) {
    const std::vector<int64_t>& shape = s.capture().Info(*q)->event.shape;
    if (shape.size() == 3) add("query head size", static_cast<double>(shape[2]));
  }
  if (heads > 1) add("head size", static_cast<double>(cols));
  add("row size", static_cast<double>(heads * cols));
  const double factor = s.Number("rope.factor", 1);
  for (std::string_view key : {"rope.mscale_all_dim", "rope.mscale"}) {
    if (const double weight = s.Number(key, 0); weight != 0) add("yarn mscale", oracle::YarnMagnitude(factor, weight));
  }
  if (factor > 1 && s.Text("rope.type", "yarn") == "yarn") add("yarn magnitude", oracle::YarnMagnitude(factor, 1));
  for (std::string_view key : {"k_scale", "v_scale", "kv_scale", "softmax_scale", "routed_scaling_factor",
                               "branch_scale", "residual_scale", "embed_scale", "logit_scale", "rope.factor"}) {
    add(std::string(key), s.Number(key, 1));
  }
  return numbers;
}

// Tensors of the same layer and step, of the same rows and width, recorded up to the result: one may stand in its
// place, or have been added to it.
// The first kMostTerms of them also as terms that may have been added: each further term is squared in pairs.
void AddTensors(const Subject& s, std::span<const Input> operands, Rows* rows) {
  const auto usable = [&](const TensorPtr& t) {
    return t != nullptr && t->n() == s.actual().size() && t->n_rows() == static_cast<int64_t>(s.judged().size());
  };
  const auto add = [&](const std::string& name, const Tensor& t) {
    const size_t n = rows->problem().arrays.size();
    if (n < kMostArrays) rows->Add(name, rows->Take(t.values)).as_term = n < kMostTerms;
  };
  for (const Input& input : operands) {
    if (usable(input.tensor)) add(input.name, *input.tensor);
  }
  if (s.info().prefix.empty()) return;
  for (const std::string& name : s.capture().Names()) {
    const bool known = std::any_of(operands.begin(), operands.end(), [&](const Input& in) { return in.name == name; });
    if (known || name == s.info().name || !name.starts_with(s.info().prefix)) continue;
    if (const TensorPtr t = s.Operand(name); usable(t) && !t->rows.empty() && SameRows(*t, *s.tensor())) add(name, *t);
  }
}

// Rows of the same result in earlier steps, from the first one on.
void AddEarlier(const Subject& s, Rows* rows) {
  int added = 0;
  for (EventId id : s.capture().EventsOf(s.info().name)) {
    const auto info = s.capture().Info(id);
    if (added >= kMostEarlier || !s.capture().Earlier(id, s.info().id)) break;
    if (info->event.rank != s.info().event.rank || info->event.step >= s.info().event.step || !info->audit.empty())
      continue;
    auto earlier = s.capture().Load(id);
    if (!earlier.ok() || (*earlier)->row_size() != rows->width() || (*earlier)->n() > kMostElements) continue;
    fit::NamedArray& array = rows->Add("step " + std::to_string(info->event.step), (*earlier)->values);
    array.as_candidate = array.as_term = false;
    array.as_rows = true;
    ++added;
  }
}

bool EndsWith(const Subject& s, std::initializer_list<std::string_view> stems) {
  return std::any_of(stems.begin(), stems.end(), [&](std::string_view x) { return s.info().name.ends_with(x); });
}

// The class that an explanation tells by itself; KERNEL: it tells none.
// What the explanation means depends on where it is seen: rows moved are another request's in attention, another
// expert's in a mixture, a stride elsewhere.
std::string_view ClassOf(const Subject& s, const fit::Explanation& x, bool quantised) {
  using fit::Kind;
  const bool reduced = EndsWith(s, {"moe.out", "attn.o_proj", "mlp.down", "moe.routed", "moe.shared"});
  // Products whose columns are heads, experts or tokens of the vocabulary.
  const bool slots = EndsWith(s, {"attn.q_proj", "attn.k_proj", "attn.v_proj", "moe.router_logits", "logits"});
  const bool ranks = s.capture().world_size() > 1;
  switch (x.kind) {
    case Kind::kScale:
    case Kind::kScaleOfSome:
    case Kind::kScaleEach:
      // Of a norm: statistics of other rows or columns.
      if (x.kind == Kind::kScaleEach && s.info().name.find("norm") != std::string::npos) return fault_class::kKernel;
      // A number that is also a plain one, as 2, speaks of ranks in the result of a reduction alone.
      if (ranks && x.constant_name.find("ranks") != std::string::npos &&
          (reduced || x.constant_name.find(" = ") == std::string::npos)) {
        return fault_class::kReduce;
      }
      return quantised ? fault_class::kQScale : fault_class::kScale;
    case Kind::kCombination:
    case Kind::kAdded:
      return reduced && ranks ? fault_class::kReduce : fault_class::kKernel;
    // In other places: rows of the weight lie in other slots, between ranks or of one.
    case Kind::kHeadsMoved:
      return slots && !ranks ? fault_class::kLoad : fault_class::kTpShard;
    case Kind::kRowsMoved:
      return s.info().name.find("attn.") != std::string::npos  ? fault_class::kKvIdent
             : s.info().name.find("moe.") != std::string::npos ? fault_class::kMoeRoute
                                                               : fault_class::kStride;
    case Kind::kInterleaved:
      if (EndsWith(s, {"gate_up", "moe.act", "mlp.act", "mlp.gate", "mlp.up"})) return fault_class::kMoeLayout;
      if (EndsWith(s, {"attn.q", "attn.k", "attn.q_pe", "attn.k_pe", "attn.q_proj", "attn.k_proj"}))
        return fault_class::kRopeForm;
      return fault_class::kStride;
    case Kind::kColumnsMoved:
      if (quantised) return fault_class::kQLayout;
      if (slots) return ranks ? fault_class::kTpShard : fault_class::kLoad;
      return fault_class::kStride;
    case Kind::kTransposed:
    case Kind::kOtherStride:
      return fault_class::kStride;
    case Kind::kRowsOf:
    case Kind::kZero:
    case Kind::kConstantRows:
      return fault_class::kUnwritten;
    case Kind::kCoarser:
      return fault_class::kPrecision;
    case Kind::kSaturated:
      return fault_class::kRange;
    case Kind::kCandidate:
    case Kind::kOffset:
    case Kind::kOffsetOfSome:
      break;
  }
  return fault_class::kKernel;
}

}  // namespace

bool FitsBetter(const Subject& subject, const oracle::Computed& right, const Result<oracle::Computed>& candidate) {
  if (!candidate.ok()) return false;
  const Difference d = Differ(subject, *candidate, 4);
  return d.ok && 2 * d.measured <= Differ(subject, right, 4).measured;
}

// The candidate is weighed by fit like any explanation, with its own bounds.
std::string WeightOf(const Subject& subject, const oracle::Computed& right, const oracle::Computed& candidate) {
  Rows rows(subject, right);
  if (!rows.usable() || candidate.value.size() != subject.actual().size()) return "";
  const std::vector<double> bound = rows.Bounds(candidate);
  rows.Add("candidate", rows.Take(candidate.value.values));
  rows.Connect();
  rows.problem().arrays[0].bound = bound;
  const auto answer = fit::Explain(rows.problem());
  if (!answer.ok()) return "";
  for (const fit::Explanation& x : answer->found) {
    if (x.kind == fit::Kind::kCandidate) return ResidualText(x, *answer);
  }
  return "";
}

Explanation Weighed(const Subject& subject, const oracle::Computed& right, const oracle::Computed& candidate,
                    Explanation why) {
  if (const std::string weight = WeightOf(subject, right, candidate); !weight.empty()) why.text += ": " + weight;
  return why;
}

// For causes that were found as a ratio: the right result times the constant is the candidate.
Explanation WeighedFactor(const Subject& subject, const oracle::Computed& right, Explanation why) {
  if (std::isnan(why.constant) || why.meaning.find(" / ") == std::string::npos ||
      why.text.find("beyond chance") != std::string::npos || SearchedEnough(subject)) {
    return why;
  }
  oracle::Computed scaled = right;
  for (double& x : scaled.value.values) x *= why.constant;
  for (double& x : scaled.scale.values) x *= std::abs(why.constant);
  for (double& x : scaled.inner.values) x *= std::abs(why.constant);
  return Weighed(subject, right, scaled, std::move(why));
}

std::string ConstantName(const Subject& subject, const Difference& difference, const Explanation& why) {
  const bool ratio = why.meaning.find(" / ") != std::string::npos || why.meaning.starts_with("times that");
  if (std::isnan(why.constant) || !ratio) return "";
  const Array& have = subject.actual();
  const int64_t heads = have.rank() == 3 ? std::max<int64_t>(have.shape[1], 1) : 1;
  const int64_t width = have.size() / std::max<int64_t>(static_cast<int64_t>(subject.judged().size()), 1);
  const auto known = fit::KnownConstants(NumbersOf(subject, heads, width / heads));
  // What is allowed in a row is a generous uncertainty of a constant that all of them share.
  const double uncertainty = std::min(difference.allowed, 1e-3) * std::abs(why.constant);
  return fit::ReadingsOf(why.constant, uncertainty, known);
}

bool SearchedEnough(const Subject& subject) {
  int found = 0;
  for (const Suspicion& s : subject.report().found()) {
    if (s.event == kNoEvent || subject.capture().Info(s.event)->name != subject.info().name) continue;
    if (++found >= kMostSearched) return true;
  }
  return false;
}

std::optional<Explanation> ExplainByFit(const Subject& subject, const oracle::Computed& right,
                                        std::span<const Input> operands, bool quantised) {
  if (SearchedEnough(subject)) return std::nullopt;
  Rows rows(subject, right);
  if (!rows.usable()) return std::nullopt;
  AddTensors(subject, operands, &rows);
  AddEarlier(subject, &rows);
  rows.Connect();
  rows.problem().numbers = NumbersOf(subject, rows.problem().heads, rows.problem().cols);
  const auto answer = fit::Explain(rows.problem());
  if (!answer.ok() || answer->found.empty()) return std::nullopt;
  const fit::Explanation& best = answer->found.front();
  Explanation why{ClassOf(subject, best, quantised), "fits " + std::string(NameOf(best.kind))};
  if (!best.array.empty()) why.text += " of " + best.array;
  if (!best.parameters.empty()) why.text += ", " + best.parameters;
  if (!best.constant_name.empty()) why.text += " (" + best.constant_name + ")";
  why.text += ": " + ResidualText(best, *answer);
  if (best.constant) {
    why.constant = *best.constant;
    why.meaning = best.kind == fit::Kind::kAdded || best.kind == fit::Kind::kCombination
                      ? "times that " + best.array + " is in the result"
                  : best.kind == fit::Kind::kOffset || best.kind == fit::Kind::kOffsetOfSome ? "result used - expected"
                                                                                             : "result used / expected";
  }
  why.rank = why.cls == fault_class::kKernel ? 1 : 2;
  return why;
}

namespace {

// Rows of an operand: an array's own, or made once and kept.
class RowSource {
 public:
  explicit RowSource(const Array& a) : rows_(a.rows()), cols_(a.cols()), array_(&a) {}
  explicit RowSource(const OperandRows& made) : rows_(made.rows), cols_(made.cols), made_(&made) {}
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  std::span<const double> row(int64_t r) {
    if (array_ != nullptr) return array_->row(r);
    std::vector<double>& kept = kept_[r];
    for (int64_t c = static_cast<int64_t>(kept.size()); c < cols_; ++c) kept.push_back(made_->at(r, c));
    return kept;
  }

 private:
  int64_t rows_, cols_;
  const Array* array_ = nullptr;
  const OperandRows* made_ = nullptr;
  std::map<int64_t, std::vector<double>> kept_;
};

// Twelve rows by twelve columns, evenly spread, at eight allowances: a wrong candidate fails in one of the first, at
// the price of one dot product.
bool MayFit(const Subject& subject, RowSource x, int64_t x_first, RowSource w, int64_t w_first, const Array& bias) {
  const Array& have = subject.actual();
  const auto n_rows = static_cast<int64_t>(subject.judged().size());
  if (n_rows == 0 || have.size() == 0) return true;
  const int64_t width = have.size() / n_rows, k = x.cols();
  if (k == 0 || w.cols() != k || x_first + n_rows > x.rows() || w_first + width > w.rows()) return true;
  const int64_t some_rows = std::min(n_rows, kScreened), some_cols = std::min(width, kScreened);
  const oracle::Precision p = subject.precision();
  oracle::Computed one;
  one.value = one.scale = Array::Filled({1});
  one.k = static_cast<double>(k + 1);
  for (int64_t a = 0; a < some_rows; ++a) {
    const int64_t row = a * n_rows / some_rows;
    if (!subject.judged()[static_cast<size_t>(row)]) continue;
    const std::span<const double> left = x.row(x_first + row);
    for (int64_t b = 0; b < some_cols; ++b) {
      const int64_t col = b * width / some_cols;
      const std::span<const double> right = w.row(w_first + col);
      double sum = bias.size() == width ? bias[col] : 0, size = std::abs(sum);
      for (size_t c = 0; c < left.size(); ++c) {
        const double term = left[c] * right[c];
        sum += term;
        size += std::abs(term);
      }
      one.value[0] = sum;
      one.scale[0] = size;
      if (!(std::abs(have[row * width + col] - sum) <= 8 * Allowed(one, 0, p, subject.one_store))) return false;
    }
  }
  return true;
}

}  // namespace

bool ProductMayFit(const Subject& subject, const Array& x, int64_t x_first, const Array& w, int64_t w_first,
                   const Array& bias) {
  return MayFit(subject, RowSource(x), x_first, RowSource(w), w_first, bias);
}

bool ProductMayFit(const Subject& subject, const Array& x, int64_t x_first, const OperandRows& w, int64_t w_first,
                   const Array& bias) {
  return MayFit(subject, RowSource(x), x_first, RowSource(w), w_first, bias);
}

bool ProductMayFit(const Subject& subject, const OperandRows& x, int64_t x_first, const Array& w, int64_t w_first,
                   const Array& bias) {
  return MayFit(subject, RowSource(x), x_first, RowSource(w), w_first, bias);
}

}  // namespace assay::op
