// Activations of dense and of experts' feed-forward layers: which function, in which order of gate and up.
#include "check/op_checks.h"
#include "check/op_explain.h"
#include "check/op_fitted.h"
#include "check/op_moe.h"
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
std::optional<Explanation> OtherFunction(const Subject& s, const ActivationSpec& declared, const Computed& right,
                                         const Run& run) {
  for (Activation kind : oracle::AllActivations()) {
    if (kind == declared.kind) continue;
    ActivationSpec spec = declared;
    spec.kind = kind;
    spec.composed = true;  // which way the other one was computed is not known
    if (const auto other = run(spec); FitsBetter(s, right, other)) {
      return Weighed(s, right, *other,
                     {fault_class::kKernel, "fits the activation " + std::string(NameOf(kind)) + ", " +
                                                std::string(NameOf(declared.kind)) + " is declared"});
    }
  }
  if (declared.kind != Activation::kSwigluOai) return std::nullopt;
  ActivationSpec open = declared;
  open.limit = 0;
  if (const auto other = run(open); FitsBetter(s, right, other))
    return Weighed(s, right, *other, {fault_class::kKernel, "fits the activation without its limit"});
  return std::nullopt;
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
    if (const auto other = with(!interleaved, *declared, gate_up); FitsBetter(s, right, other)) {
      return Weighed(s, right, *other,
                     {fault_class::kMoeLayout, interleaved ? "fits halves, interleaved gate and up are declared"
                                                           : "fits interleaved gate and up, halves are declared"});
    }
    Array swapped = gate_up;  // up in front of gate
    const int64_t n = swapped.cols(), half = n / 2;
    for (int64_t r = 0; r < swapped.rows(); ++r) {
      for (int64_t c = 0; c < n; ++c) swapped[r * n + c] = gate_up[r * n + (interleaved ? (c ^ 1) : (c + half) % n)];
    }
    if (const auto other = with(interleaved, *declared, swapped); FitsBetter(s, right, other))
      return Weighed(s, right, *other, {fault_class::kMoeLayout, "fits up in front of gate"});
    if (auto why = OtherFunction(s, *declared, right,
                                 [&](const ActivationSpec& spec) { return with(interleaved, spec, gate_up); }))
      return why;
    // Two faults at once, another function and another layout: only after each alone has failed.
    for (bool order : {false, true}) {
      if (auto why = OtherFunction(s, *declared, right, [&](const ActivationSpec& spec) {
            return with(order ? interleaved : !interleaved, spec, order ? swapped : gate_up);
          })) {
        why->cls = fault_class::kMoeLayout;
        why->text += order ? ", with up in front of gate" : ", with gate and up in the other layout";
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
    if (auto why =
            OtherFunction(s, *declared, right, [&](const ActivationSpec& spec) { return with(in[0], in[1], spec); }))
      return why;
    if (up == nullptr) return std::nullopt;
    if (const auto other = with(in[1], in[0], *declared); FitsBetter(s, right, other))
      return Weighed(s, right, *other, {fault_class::kMoeLayout, "fits the activation on up in place of gate"});
    if (auto why =
            OtherFunction(s, *declared, right, [&](const ActivationSpec& spec) { return with(in[1], in[0], spec); })) {
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
