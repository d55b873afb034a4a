// Activations of dense and of experts' feed-forward layers: which function, in which order of gate and up.
#include "check/op_checks.h"
#include "check/op_experts_explain.h"
#include "check/op_explain.h"
#include "check/op_fitted.h"
#include "check/op_moe.h"
#include "check/op_moe_layout.h"
#include "check/op_moe_rows.h"
#include "oracle/activation.h"

namespace assay::check {
namespace {

using namespace op;
using oracle::Activation;
using oracle::ActivationSpec;
using oracle::Array;
using oracle::Computed;
using Run = std::function<Result<Computed>(const ActivationSpec&)>;

// The declared activation; nullopt after a report when it is not one that is known.
std::optional<ActivationSpec> SpecOf(const Subject& s) {
  const std::string word = s.Text("activation", "silu");
  auto spec = oracle::ParseActivation(word);
  if (!spec) {
    std::string known;
    for (Activation each : oracle::AllActivations()) known.append(known.empty() ? "" : ", ").append(NameOf(each));
    s.report().Missing(s.info().name + ": activation=" + word + " is not known", "record one of " + known);
    return std::nullopt;
  }
  spec->alpha = s.Number("swiglu_alpha", spec->alpha);
  spec->limit = s.Number("swiglu_limit", spec->limit);
  return spec;
}

// Another function than the declared one, or its limit left out.
std::optional<Explanation> OtherFunction(const ActivationSpec& declared, const ByExpert& by, const Run& run) {
  for (Activation kind : oracle::AllActivations()) {
    if (kind == declared.kind) continue;
    ActivationSpec spec = declared;
    spec.kind = kind;
    spec.composed = true;  // which way the other one was computed is not known
    if (auto why = by.Try(run(spec), {fault_class::kKernel, "fits the activation " + std::string(NameOf(kind)) + ", " +
                                                                std::string(NameOf(declared.kind)) + " is declared"}))
      return why;
  }
  if (declared.kind != Activation::kSwigluOai) return std::nullopt;
  ActivationSpec open = declared;
  open.limit = 0;
  return by.Try(run(open), {fault_class::kKernel, "fits the activation without its limit"});
}

// moe.act [rows, f] of moe.gate_up [rows, 2 f].
void JudgeFused(Subject& s) {
  const TensorPtr both = s.Operand(s.Sibling("moe.gate_up"));
  if (both == nullptr) {
    if (s.tensor()->shape.size() != 3) Missing(s, s.Sibling("moe.gate_up"));
    return;
  }
  const auto declared = SpecOf(s);
  if (!declared) return;
  const bool interleaved = s.Text("gate_up_layout", "halves") == "interleaved";
  const auto with = [](bool pairs, const ActivationSpec& use, const Array& gate_up) {
    return oracle::GateFused(gate_up, pairs ? oracle::GateUpLayout::kInterleaved : oracle::GateUpLayout::kHalves, use);
  };
  Operation act;
  act.inputs = {{both->info->name, both}};
  act.run = [&](std::span<const Array> in) { return with(interleaved, *declared, in[0]); };
  JudgeOperation(s, act, [&](const Difference&, const Computed& right) -> std::optional<Explanation> {
    const Array gate_up = ToArray(*both);
    const auto rows = ExpertRowsOf(s, *s.tensor());
    const ByExpert by(s, rows ? rows->expert : std::vector<int64_t>(), right);
    const int64_t n = gate_up.cols(), half = n / 2;
    if (half == 0) return std::nullopt;
    const GateUpOrder order{interleaved ? 1 : half};
    // The columns as a kernel finds them that takes them for another order.
    const auto taken_for = [&](const GateUpOrder& other) {
      const std::vector<int64_t> from = Reorder(other, order, half);
      Array moved = gate_up;
      for (int64_t i = 0; i < moved.size(); ++i) moved[i] = gate_up[i - i % n + from[static_cast<size_t>(i % n)]];
      return moved;
    };
    const auto other_function = [&](const Array& columns) {
      return OtherFunction(*declared, by, [&](const ActivationSpec& spec) { return with(interleaved, spec, columns); });
    };
    for (const GateUpOrder& other : GateUpOrders(half)) {
      if (other == order) continue;
      if (auto why = by.Try(
              with(interleaved, *declared, taken_for(other)),
              {fault_class::kMoeLayout, "fits " + NameOf(other, half) + ", " + NameOf(order, half) + " declared"}))
        return why;
    }
    if (auto why = other_function(gate_up)) return why;
    // Two faults at once, another function and another layout: only after each alone has failed.
    for (const GateUpOrder& other : {GateUpOrder{interleaved ? half : 1}, GateUpOrder{order.block, true}}) {
      if (auto why = other_function(taken_for(other))) {
        why->cls = fault_class::kMoeLayout;
        why->text += ", with " + NameOf(other, half);
        return why;
      }
    }
    return std::nullopt;
  });
}

// Of a layer that has an up projection, whose result was not recorded: the activation of gate alone is not what is due.
bool IsGated(const Subject& s) {
  if (s.capture().HasSite(s.Sibling("mlp.up"))) return true;
  for (std::string_view weight : {"mlp.up_proj.weight", "mlp.gate_up_proj.weight", "mlp.up_proj.weight.codes"}) {
    if (s.capture().HasSite(s.Sibling(weight))) return true;
  }
  return s.Text("activation", "silu") == "swiglu_oai";
}

// mlp.act [T, f] of mlp.gate and mlp.up [T, f]; without an up projection the activation of gate alone.
void JudgeDense(Subject& s) {
  const TensorPtr gate = s.Operand(s.Sibling("mlp.gate")), up = s.Operand(s.Sibling("mlp.up"));
  if (gate == nullptr) {
    if (up != nullptr) Missing(s, s.Sibling("mlp.gate"));
    return;
  }
  if (up == nullptr && IsGated(s)) return Missing(s, s.Sibling("mlp.up"));
  const auto declared = SpecOf(s);
  if (!declared) return;
  const auto with = [&](const Array& g, const Array& u, const ActivationSpec& spec) -> Result<Computed> {
    if (up == nullptr) return oracle::Activate(g, spec);
    return oracle::Gate(g, u, spec);
  };
  Operation act;
  act.inputs = {{gate->info->name, gate}, {s.Sibling("mlp.up"), up}};
  act.run = [&](std::span<const Array> in) { return with(in[0], in[1], *declared); };
  // gate and act alone may be two of three: what does not fit any function of gate was multiplied by what is missing.
  if (up == nullptr) act.lacking = s.Sibling("mlp.up");
  JudgeOperation(s, act, [&](const Difference&, const Computed& right) -> std::optional<Explanation> {
    const auto in = act.arrays();
    const ByExpert all(s, {}, right);
    if (auto why = OtherFunction(*declared, all, [&](const ActivationSpec& spec) { return with(in[0], in[1], spec); }))
      return why;
    if (up == nullptr) return std::nullopt;
    if (const auto other = with(in[1], in[0], *declared); FitsBetter(s, right, other))
      return Weighed(s, right, *other, {fault_class::kMoeLayout, "fits the activation on up in place of gate"});
    if (auto why =
            OtherFunction(*declared, all, [&](const ActivationSpec& spec) { return with(in[1], in[0], spec); })) {
      why->cls = fault_class::kMoeLayout;
      why->text += ", on up in place of gate";
      return why;
    }
    const Computed alone = oracle::Activate(in[0], *declared);
    if (FitsBetter(s, right, alone))
      return Weighed(s, right, alone, {fault_class::kKernel, "fits the activation of gate, not multiplied by up"});
    return std::nullopt;
  });
}

}  // namespace

void JudgeActivation(Subject& s, bool experts) { experts ? JudgeFused(s) : JudgeDense(s); }

}  // namespace assay::check
