// Operations at names of their own, which say what they are by metadata `op` and `inputs`.
#include <algorithm>
#include <cmath>
#include <set>

#include "check/op_attention.h"
#include "check/op_checks.h"
#include "check/op_explain.h"
#include "check/op_moe.h"
#include "check/op_quant_explain.h"
#include "check/op_rope.h"
#include "oracle/activation.h"
#include "oracle/linear.h"
#include "oracle/norm.h"
#include "oracle/softmax.h"

namespace assay::check {
namespace {

using namespace op;
using oracle::Array;

// names: the operands in the order that docs/adding-a-case.md gives for the operation. Composite operations are handed
// to the judge of their canonical names; the others are one call of an oracle.
void JudgeDeclaredOperation(Subject& s, const std::string& kind, const std::vector<std::string>& names) {
  Operation op;
  for (const std::string& name : names) {
    TensorPtr t = s.Operand(name);
    if (t == nullptr) t = s.Weight(name);
    if (t == nullptr) return Missing(s, name);
    op.inputs.push_back({name, t});
  }
  if (op.inputs.empty()) return;
  // Of a layer without rotary embedding: judged by the check that knows how the other layers turn.
  const bool rotated = IsRotated(s.info().name.substr(s.info().prefix.size()));
  if (kind == "copy" && rotated && op.inputs[0].name == s.info().name + "_proj") return;
  const size_t n = op.inputs.size();
  const auto operand = [&](size_t i) { return i < n ? op.inputs[i].tensor : nullptr; };
  if (kind == "attention" && n >= 3) return JudgeCall(s, names);
  if (kind == "merge" && n >= 2) return JudgeMerged(s, op.inputs);
  if (kind == "router" && !IsFloat(s.info().event.dtype)) return JudgeChoice(s, operand(0), operand(1));
  if (kind == "router" && n >= 2) return JudgeChoiceWeights(s, operand(0), operand(1), operand(2));
  if (kind == "combine" && n >= 2) {
    if (n < 3 && operand(0)->shape.size() != 3) return Missing(s, "the ids that rows are sorted by");
    return JudgeCombined(s, operand(0), operand(1), n < 3 ? operand(1) : operand(2));
  }
  // The oracle keeps the operand's axes, the recording may have others for the same elements.
  const auto reshaped = [&](Result<oracle::Computed> y) -> Result<oracle::Computed> {
    if (y.ok() && y->value.size() == s.actual().size()) y->value.shape = s.actual().shape;
    return y;
  };
  const double eps = s.Number("eps", 1e-6);
  if (kind == "linear" && n >= 2) {
    op.run = [=](std::span<const Array> in) {
      Array x = in[0];
      // Heads recorded on an axis of their own are one row for a projection.
      if (x.cols() != in[1].cols() && x.rank() > 2 && x.size() > 0) x.shape = {x.shape[0], x.size() / x.shape[0]};
      return reshaped(oracle::Linear(x, in[1], n > 2 ? in[2] : Array{{0}, {}}));
    };
  } else if (kind == "rmsnorm") {
    op.run = [=](std::span<const Array> in) { return oracle::RmsNorm(in[0], n > 1 ? in[1] : Array{{0}, {}}, eps); };
  } else if (kind == "layernorm") {
    op.run = [=](std::span<const Array> in) {
      return oracle::LayerNorm(in[0], n > 1 ? in[1] : Array{{0}, {}}, n > 2 ? in[2] : Array{{0}, {}}, eps);
    };
  } else if (kind == "softmax" || kind == "log_softmax") {
    op.run = [=](std::span<const Array> in) {
      return kind == "softmax" ? oracle::Softmax(in[0]) : oracle::LogSoftmax(in[0]);
    };
  } else if (kind == "add" || kind == "sum_ranks" || kind == "copy") {
    op.run = [=](std::span<const Array> in) -> Result<oracle::Computed> {
      std::vector<oracle::Term> terms;
      std::vector<Array> same(in.begin(), in.end());
      for (Array& a : same) {
        if (a.size() != same[0].size()) return Status::BadInput("terms have other shapes");
        a.shape = same[0].shape;
      }
      for (const Array& a : same) terms.push_back({1, &a});
      return reshaped(oracle::LinearCombination(terms));
    };
  } else if (kind == "activation") {
    const auto declared = oracle::ParseActivation(s.Text("activation", "silu"));
    if (!declared) return Missing(s, "an activation that is known, with it " + s.info().name);
    oracle::ActivationSpec spec = *declared;
    spec.alpha = s.Number("swiglu_alpha", spec.alpha);
    spec.limit = s.Number("swiglu_limit", spec.limit);
    const bool pairs = s.Text("gate_up_layout", "halves") == "interleaved";
    op.run = [=](std::span<const Array> in) -> Result<oracle::Computed> {
      if (n > 1) return oracle::Gate(in[0], in[1], spec);
      return oracle::GateFused(in[0], pairs ? oracle::GateUpLayout::kInterleaved : oracle::GateUpLayout::kHalves, spec);
    };
  } else if (kind == "rope") {
    auto rotation = RotationOf(s, s.tensor()->dim(-1));
    if (!rotation.ok() || s.tensor()->rows.empty()) return;
    std::vector<double> positions;
    for (const RowId& id : s.tensor()->rows) positions.push_back(static_cast<double>(id.position));
    op.run = [=](std::span<const Array> in) {
      return oracle::Rotate(in[0], positions, rotation->frequencies, rotation->layout);
    };
  } else if (kind == "dequant") {
    const std::string& codes = names[0];
    const bool activation = codes.ends_with(".q");
    const std::string parts = codes.substr(0, codes.size() - (activation ? 1 : 5));
    if ((!activation && !codes.ends_with(".codes")) || !HasCodes(s, parts, activation))
      return Missing(s, codes + " with its scales, as NAME.codes or NAME.q");
    op.run = [&s, parts, activation](std::span<const Array>) -> Result<oracle::Computed> {
      ASSAY_ASSIGN_OR_RETURN(const DequantParts apart, TakeApart(s, parts, activation));
      return Decoded(apart.Values(), apart, s.actual().shape);
    };
    // Codes are no operand that could have been written over: TakeApart reads them itself.
    op.inputs.clear();
  } else {
    return s.report().Missing(s.info().name + ": op=" + kind + " is judged at its own names alone",
                              "record it under the names of docs/adding-a-case.md");
  }
  JudgeOperation(s, op, [&](const Difference&, const oracle::Computed& right) -> std::optional<Explanation> {
    const double c = ConstantRatio(s.actual(), right.value, s.judged(), std::max(1e-4, 8 * s.precision().store));
    if (!std::isnan(c) && kind == "dequant")
      return Explanation{fault_class::kQScale, "the result is one constant off", c, "result used / expected"};
    if (kind == "dequant") {
      const bool activation = names[0].ends_with(".q");
      const std::string parts = names[0].substr(0, names[0].size() - (activation ? 1 : 5));
      QuantisedProduct q;
      q.name = names[0];
      q.activation = activation;
      q.is_value = true;
      q.plain = false;
      q.decode = [&](const DequantVariant& variant) { return TakeApart(s, parts, activation, variant); };
      q.product = [&](const Array& value) -> Result<oracle::Computed> {
        if (value.size() != right.value.size()) return Status::BadInput("another shape");
        oracle::Computed y = right;
        y.value.values = value.values;
        for (int64_t i = 0; i < value.size(); ++i) y.scale[i] = std::abs(value[i]);
        return y;
      };
      if (auto why = ExplainQuantised(s, q, right)) return why;
      return std::nullopt;
    }
    if (!std::isnan(c))
      return Explanation{kind == "sum_ranks" || kind == "add" ? fault_class::kReduce : fault_class::kScale,
                         "the result is one constant off", c, "result used / expected"};
    return std::nullopt;
  });
}

}  // namespace

// inputs: names joined by commas.
void JudgeDeclared(const Capture& capture, CheckReport* report) {
  for (const std::string& name : capture.Names()) {
    for (EventId id : capture.EventsOf(name)) {
      const auto info = capture.Info(id);
      const auto kind = Capture::OwnText(*info, "op"), inputs = Capture::OwnText(*info, "inputs");
      if (!kind || !inputs) break;  // said on every event of a site or on none
      if (info->audit == "before" || info->audit == "read") continue;
      auto tensor = capture.Load(id);
      if (!tensor.ok()) {
        report->Missing(tensor.status().message(), Capture::RecordHint(name));
        break;
      }
      std::vector<std::string> names;
      for (size_t at = 0; at < inputs->size();) {
        const size_t comma = std::min(inputs->find(',', at), inputs->size());
        names.push_back(inputs->substr(at, comma - at));
        at = comma + 1;
      }
      Subject s(capture, *tensor, *report);
      JudgeDeclaredOperation(s, *kind, names);
    }
  }
}

}  // namespace assay::check
