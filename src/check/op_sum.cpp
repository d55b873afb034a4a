// Sums: the residual stream, routed and shared experts, and partial results of all ranks.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "check/op_checks.h"
#include "check/op_explain.h"
#include "check/op_stream.h"
#include "oracle/linear.h"

namespace assay::check {
namespace {

using namespace op;
using oracle::Array;

// Terms of one size, whatever their axes: a term that was recorded flat adds like any other.
Result<oracle::Computed> Add(std::span<const Array> in, std::span<const double> factors) {
  std::vector<oracle::Term> terms;
  for (size_t i = 0; i < in.size(); ++i) terms.push_back({factors[i], &in[i]});
  for (const Array& a : in) {
    if (a.size() != in[0].size()) return Status::BadInput("terms of a sum have other shapes");
  }
  std::vector<Array> same(in.begin(), in.end());
  for (size_t i = 0; i < same.size(); ++i) {
    same[i].shape = in[0].shape;
    terms[i].array = &same[i];
  }
  return oracle::LinearCombination(terms);
}

// Least squares a, b in actual = a x + b y over the judged rows; false where x and y are not independent.
bool Solve(const Subject& s, const Array& x, const Array& y, double* a, double* b) {
  double xx = 0, xy = 0, yy = 0, xo = 0, yo = 0;
  const int64_t width = s.actual().size() / std::max<int64_t>(static_cast<int64_t>(s.judged().size()), 1);
  for (int64_t i = 0; i < s.actual().size(); ++i) {
    if (!s.judged()[static_cast<size_t>(i / width)]) continue;
    if (!std::isfinite(s.actual()[i]) || !std::isfinite(x[i]) || !std::isfinite(y[i])) return false;
    xx += x[i] * x[i];
    xy += x[i] * y[i];
    yy += y[i] * y[i];
    xo += x[i] * s.actual()[i];
    yo += y[i] * s.actual()[i];
  }
  const double determinant = xx * yy - xy * xy;
  // Nearly parallel terms: any split of the sum fits, so no factor can be told.
  if (!(determinant > 1e-9 * xx * yy)) return false;
  *a = (xo * yy - yo * xy) / determinant;
  *b = (yo * xx - xo * xy) / determinant;
  return true;
}

// moe.out = routed + shared.
void JudgeMoeOut(Subject& s) {
  s.DeclareOneStore();
  const TensorPtr routed = s.Operand(s.Sibling("moe.routed")), shared = s.Operand(s.Sibling("moe.shared"));
  if (routed == nullptr) return Missing(s, s.Sibling("moe.routed"));
  if (s.capture().HasSite(s.info().name + ".partial") && s.info().event.shard.count <= 1) return;  // judged as a sum
  Operation add;
  add.inputs = {{routed->info->name, routed}};
  std::vector<double> ones{1};
  if (shared != nullptr) {
    add.inputs.push_back({shared->info->name, shared});
    ones.push_back(1);
  } else if (s.capture().HasSite(s.Sibling("moe.shared")) || s.capture().HasSite(s.Sibling("moe.shared.partial"))) {
    return Missing(s, s.Sibling("moe.shared"));
  }
  add.run = [&](std::span<const Array> in) { return Add(in, ones); };
  JudgeOperation(s, add, [&](const Difference&, const oracle::Computed& right) -> std::optional<Explanation> {
    const auto arrays = add.arrays();
    // Before factors are solved for: a factor that is 0 to rounding is a part left out.
    for (size_t i = 0; i < arrays.size(); ++i) {
      oracle::Computed alone = right;
      alone.value = arrays[i];
      if (Fits(s, alone))
        return Explanation{fault_class::kReduce, "fits " + add.inputs[i].name + " alone", 0,
                           "times that the other part was added"};
    }
    double a = 0, b = 0;
    if (shared != nullptr && arrays[0].size() == s.actual().size() && arrays[1].size() == s.actual().size() &&
        Solve(s, arrays[0], arrays[1], &a, &b)) {
      // Whole numbers and their inverses are exact; any other factor only as well as the sum is stored.
      const double factors[] = {a, b};
      if (Fits(s, Add(arrays, factors), 8)) {
        const double tolerance = std::max(1e-3, 16 * s.precision().store);
        const bool routed_right = std::abs(a - 1) <= tolerance;
        char text[120];
        std::snprintf(text, sizeof text, "fits %.5g times moe.routed and %.5g times moe.shared", a, b);
        return Explanation{
            fault_class::kReduce, text, routed_right ? b : a,
            routed_right ? "times that the shared expert was added" : "times that the routed experts were added"};
      }
    }
    return std::nullopt;
  });
}

// NAME = sum of NAME.partial over the ranks, and its bias once.
void JudgeReduced(Subject& s) {
  s.DeclareOneStore();
  const std::string partial = s.info().name + ".partial";
  EventFilter filter;
  filter.step = s.info().event.step;
  std::map<int32_t, TensorPtr> by_rank;
  for (EventId id : s.capture().Find(partial, filter)) {
    auto t = s.capture().Load(id);
    if (t.ok() && (*t)->info->repeat == s.info().repeat && (*t)->info->audit != "before")
      by_rank[(*t)->info->event.rank] = *t;
  }
  if (by_rank.empty()) return;
  const int64_t world = s.Integer("world_size", s.capture().world_size());
  // A sum of some of its parts says nothing.
  if (static_cast<int64_t>(by_rank.size()) < world) {
    return s.report().Missing(s.info().name + ": partial results of " + std::to_string(by_rank.size()) + " of " +
                                  std::to_string(world) + " ranks",
                              "record " + partial + " on every rank");
  }
  Operation sum;
  const std::string stem = s.info().name.substr(s.info().prefix.size());
  for (const auto& [rank, t] : by_rank) {
    if (t->n() != s.tensor()->n())
      return s.report().Missing(partial + " has another shape on rank " + std::to_string(rank),
                                "record partial results in full width");
    sum.inputs.push_back({partial, t});
  }
  const std::vector<double> ones(sum.inputs.size(), 1);
  const std::string bias_name = stem == "mlp.down" ? s.Sibling("mlp.down_proj.bias") : s.info().name + ".bias";
  // Row-parallel layers add their bias once, on one rank or behind the sum.
  const TensorPtr bias = s.Weight(bias_name);
  sum.run = [&](std::span<const Array> in) -> Result<oracle::Computed> {
    ASSAY_ASSIGN_OR_RETURN(oracle::Computed y, Add(in, ones));
    if (bias != nullptr && bias->n() == y.value.cols()) {
      for (int64_t i = 0; i < y.value.size(); ++i) y.value[i] += bias->values[static_cast<size_t>(i % bias->n())];
    }
    return y;
  };
  const auto own = [&](const Difference&, const oracle::Computed& right) -> std::optional<Explanation> {
    const auto mine = by_rank.find(s.info().event.rank);
    for (const auto& [rank, t] : by_rank) {
      if (!DifferExactly(s.actual(), ToArray(*t), s.judged()).ok) continue;
      return Explanation{fault_class::kReduce, mine != by_rank.end() && rank == mine->first
                                                   ? "the result is this rank's partial sum: it was not reduced"
                                                   : "the result is the partial sum of rank " + std::to_string(rank)};
    }
    const double c = ConstantRatio(s.actual(), right.value, s.judged(), std::max(1e-4, 8 * s.precision().store));
    if (!std::isnan(c))
      return Explanation{fault_class::kReduce, "the sum is one constant off", c, "sum used / expected"};
    if (bias != nullptr && bias->n() == right.value.cols()) {
      oracle::Computed more = right;
      for (int64_t i = 0; i < more.value.size(); ++i)
        more.value[i] += static_cast<double>(world - 1) * bias->values[static_cast<size_t>(i % bias->n())];
      if (Fits(s, more))
        return Explanation{fault_class::kReduce, "the bias was added on every rank", static_cast<double>(world),
                           "times that the bias was added"};
    }
    // A rank's part left out, or counted twice: one at a time.
    for (size_t left_out = 0; left_out < sum.inputs.size(); ++left_out) {
      std::vector<double> factors = ones;
      factors[left_out] = 0;
      if (Fits(s, Add(sum.arrays(), factors)))
        return Explanation{fault_class::kReduce, "fits the sum without rank " +
                                                     std::to_string(sum.inputs[left_out].tensor->info->event.rank)};
      factors[left_out] = 2;
      if (Fits(s, Add(sum.arrays(), factors)))
        return Explanation{
            fault_class::kReduce,
            "fits the sum with rank " + std::to_string(sum.inputs[left_out].tensor->info->event.rank) + " added twice"};
    }
    if (auto why = ExplainPrecision(s, right)) return why;
    return Explanation{fault_class::kReduce, "the result is not the sum of the partial ones", kNone, "", 1};
  };
  JudgeOperation(s, sum, own);
}

// out = residual_scale (prev.out + branch_scale attn.o_proj) + branch_scale FFN.
void JudgeOut(Subject& s) {
  const TensorPtr x = s.Operand(StreamInto(s.info().site.layer)), o = s.Operand(s.Sibling("attn.o_proj"));
  TensorPtr ffn = s.Operand(s.Sibling("moe.out"));
  if (ffn == nullptr) ffn = s.Operand(s.Sibling("mlp.down"));
  if (ffn == nullptr) return Missing(s, s.Sibling("mlp.down or moe.out"));
  if (x == nullptr) return Missing(s, StreamInto(s.info().site.layer));
  if (s.Flag("sandwich_norm", false)) return Missing(s, s.Sibling("attn.o_proj") + " behind its own norm");
  if (o == nullptr) return Missing(s, s.Sibling("attn.o_proj"));
  const double residual = s.Number("residual_scale", 1), branch = s.Number("branch_scale", 1);
  Operation add;
  add.inputs = {{x->info->name, x}, {o->info->name, o}, {ffn->info->name, ffn}};
  const auto run = [&](double r, double b) {
    return [r, b](std::span<const Array> in) -> Result<oracle::Computed> {
      const double factors[] = {r, r * b, b};
      ASSAY_ASSIGN_OR_RETURN(oracle::Computed y, Add(in, factors));
      y.stores += 1;  // the stream between the branches is stored
      return y;
    };
  };
  add.run = run(residual, branch);
  JudgeOperation(s, add, [&](const Difference&, const oracle::Computed& right) -> std::optional<Explanation> {
    const auto arrays = add.arrays();
    // The stream after attention as one operand that may have been written over, by its norm for instance.
    if (s.Flag("compiled", false) || s.Flag("inplace", false)) {
      for (const std::string& name : s.capture().Names()) {
        if (!name.starts_with(s.info().prefix) || name == s.info().name) continue;
        const TensorPtr other = s.Operand(name);
        if (other == nullptr || other->n() != s.tensor()->n()) continue;
        const std::vector<Array> two{ToArray(*other), arrays[2]};
        const double factors[] = {residual, branch};
        if (Fits(s, Add(two, factors)))
          return Explanation{
              fault_class::kCompile,
              "fits " + name +
                  " in place of the stream behind attention: it was written over before compiled code read it"};
      }
    }
    // Before factors are solved for: a factor that is 0 to rounding is an addend left out. Compiled code loses one
    // where an addition in place has no effect.
    const char* names[] = {"the stream", "attn.o_proj", "the FFN"};
    const bool compiled = s.Flag("compiled", false) || s.Flag("inplace", false);
    for (size_t i = 0; i < 3; ++i) {
      auto without = arrays;
      std::fill(without[i].values.begin(), without[i].values.end(), 0.0);
      if (Fits(s, add.run(without)))
        return Explanation{compiled ? fault_class::kCompile : fault_class::kKernel,
                           std::string("fits without ") + names[i] + ": it was left out"};
    }
    // Terms of the stream behind attention, prev.out and attn.o_proj, as one array.
    const double zero_one[] = {1, branch};
    if (auto stream = Add(std::span(arrays).first(2), zero_one); stream.ok()) {
      double a = 0, b = 0;
      if (Solve(s, stream->value, arrays[2], &a, &b)) {
        oracle::Computed fit = right;
        for (int64_t i = 0; i < fit.value.size(); ++i) {
          fit.value[i] = a * stream->value[i] + b * arrays[2][i];
          fit.scale[i] = std::abs(a) * stream->scale[i] + std::abs(b * arrays[2][i]);
        }
        if (Fits(s, fit, 8)) {
          const double tolerance = std::max(1e-3, 16 * s.precision().store);
          const bool ffn_right = std::abs(b - branch) <= tolerance * std::abs(branch);
          char text[120];
          std::snprintf(text, sizeof text, "fits %.5g times the stream and %.5g times the FFN", a, b);
          if (ffn_right) return Explanation{fault_class::kRange, text, a / residual, "residual used / expected"};
          const double world = static_cast<double>(s.capture().world_size());
          // A replicated FFN that every rank added before the sum over ranks.
          if (world > 1 && std::abs(b - branch * world) < 0.02 * world)
            return Explanation{fault_class::kReduce, text, b / branch, "times that the FFN was added"};
          return Explanation{fault_class::kRange, text, b / branch, "branch used / expected"};
        }
      }
    }
    return std::nullopt;
  });
}

}  // namespace

// Whatever has a ".partial" beside it is judged as a sum over ranks, canonical or not.
void JudgeSums(const Capture& capture, CheckReport* report) {
  constexpr std::string_view kMoe[] = {"moe.out"};
  JudgeStems(capture, report, kMoe, JudgeMoeOut);
  for (const std::string& name : capture.Names()) {
    if (!name.ends_with(".partial")) continue;
    const std::string whole = name.substr(0, name.size() - 8), stem = ParseSiteName(whole).stem;
    const std::string_view stems[] = {stem};
    JudgeStems(capture, report, stems, [&](Subject& s) {
      if (s.info().name == whole) JudgeReduced(s);
    });
  }
}

void JudgeResidual(const Capture& capture, CheckReport* report) {
  constexpr std::string_view kOut[] = {"out"};
  JudgeStems(capture, report, kOut, JudgeOut);
}

}  // namespace assay::check
