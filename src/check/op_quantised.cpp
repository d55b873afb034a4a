// Activations quantised on the way into a GEMM: scales in the declared layout, and codes under them.
#include <algorithm>
#include <cmath>
#include <set>

#include "check/op_checks.h"
#include "check/op_dequant.h"
#include "check/op_explain.h"
#include "quant/misreading.h"

namespace assay::check {
namespace {

using namespace op;
using oracle::Array;

// Largest magnitude of a code.
// 448: e4m3, also under names like fp8_block. The scale of a group is its largest magnitude over this.
double TopOf(const std::string& quant) {
  if (quant == "nvfp4" || quant == "mxfp4") return 6;
  if (quant.starts_with("int8")) return 127;
  return 448;
}

// NAME.q_scale against the input NAME [T, D]: a dynamic scale of a group of G columns is max |x| / top. Static scales
// come from calibration, and nothing in the trace says what they should be.
void JudgeGroupScales(Subject& s) {
  const std::string quant = Capture::OwnText(s.info(), "quant").value_or("");
  if (quant.empty() || s.Text("scale_rule", "static") != "dynamic") return;
  const std::string of =
      Capture::OwnText(s.info(), "scale_of").value_or(s.info().name.substr(0, s.info().name.size() - 8));
  const TensorPtr x = s.Operand(of);
  if (x == nullptr) return Missing(s, of);
  const int64_t rows = x->n_rows(), width = x->row_size();
  // NVFP4 groups 16 values, MXFP4 32 (OCP Microscaling Formats 1.0, section 5.2); without a group a row has one scale.
  int64_t group = s.Integer("group_size", quant == "nvfp4" ? 16 : quant == "mxfp4" ? 32 : width);
  if (group <= 0 || width % group != 0) return;
  const bool blocks = s.actual().rank() == 2 || s.actual().size() >= rows * (width / group);
  const int64_t columns = s.actual().rank() >= 2 ? s.actual().cols() : std::max<int64_t>(width / group, 1);
  if (!blocks || s.actual().size() < rows * (width / group)) return;
  const bool power = quant == "mxfp4";
  // Scales are stored in e4m3 (nvfp4) or as powers of two (mxfp4), whatever holds them.
  const double tolerance = power ? 1.01 : quant == "nvfp4" ? 2 * 0x1p-4 : std::max(1e-5, 4 * s.precision().store);
  // Scales that are not within the tolerance when read in the given layout.
  const auto right_by = [&](bool swizzled) {
    int64_t wrong = 0;
    for (int64_t m = 0; m < rows; ++m) {
      if (!x->rows.empty() && !x->rows[static_cast<size_t>(m)].real()) continue;
      for (int64_t k = 0; k < width / group; ++k) {
        double top = 0;
        for (int64_t c = 0; c < group; ++c)
          top = std::max(top, std::abs(x->row(m)[static_cast<size_t>(k * group + c)]));
        const int64_t at = swizzled ? SwizzledPlace(m, k, columns) : m * columns + k;
        if (at >= s.actual().size()) {
          ++wrong;
          continue;
        }
        double have = s.actual()[at];
        // Stored as an e8m0 exponent with bias 127.
        if (power && s.info().event.dtype == DType::kU8) have = std::exp2(have - 127);
        const double want = top / TopOf(quant);
        // Rules for the exponent differ by a factor of two (floor, round up, range of the code), so either neighbour is
        // right.
        if (power ? !(have >= want / 2.02 && have <= want * 4.04)
                  : !(std::abs(have - want) <= tolerance * want + 0x1p-10))
          ++wrong;
      }
    }
    return wrong;
  };
  const bool declared = s.Text("scale_layout", "linear") == "swizzle_128x4";
  const int64_t wrong = right_by(declared);
  if (wrong == 0) return s.report().Right(s.info().id);
  // All scales are right in the other layout: that is no accident.
  if (right_by(!declared) == 0) {
    return ReportRule(s.capture(), s.report(), s.info(),
                      {fault_class::kQLayout, declared ? "scales lie row by row where the swizzled layout is declared"
                                                       : "scales lie in the swizzled layout where rows are declared"});
  }
  ReportRule(s.capture(), s.report(), s.info(),
             {fault_class::kQScale,
              std::to_string(wrong) + " scales are not those of the largest magnitude of their group", kNone, "", 1});
}

// Of codes that are integers: how many are 2^bits away from what is due, where all others are right; 0 where some are
// wrong otherwise.
int64_t Wrapped(const Subject& s, const std::string& name, const Tensor& x) {
  const auto parts = TakeApart(s, name, true);
  if (!parts.ok() || !parts->integers || parts->rows * parts->cols != x.n()) return 0;
  const double period = std::exp2(parts->bits);
  int64_t wrapped = 0;
  for (int64_t i = 0; i < x.n(); ++i) {
    const auto at = static_cast<size_t>(i);
    const auto row = static_cast<size_t>(i / std::max<int64_t>(x.row_size(), 1));
    if (row < x.rows.size() && !x.rows[row].real()) continue;
    const double scale = parts->ScaleOf(i) * parts->global;
    const double due = x.values[at] / scale + (parts->zero.empty() ? 0 : double{parts->zero[at]});
    const double off = double{parts->code[at]} - due;
    // A cut code is off by what it was cut by; one that wrapped lies on the other side.
    const bool cut = std::abs(due) > period / 2 - 2 && (parts->code[at] > 0) == (due > 0);
    if (std::abs(off) <= 1 || cut) continue;
    if (std::abs(std::abs(off) - period) > 1) return 0;
    ++wrapped;
  }
  return wrapped;
}

// Codes times scales come back to the input within half a step of the code grid.
// NAME.q under NAME.q_scale against NAME. The distance is relative, over all real rows, so that one saturated element
// does not decide.
void JudgeCodes(Subject& s) {
  const std::string name = s.info().name.substr(0, s.info().name.size() - 1);  // "NAME."
  const TensorPtr x = s.Operand(name.substr(0, name.size() - 1));
  const std::string quant = Capture::OwnText(s.info(), "quant").value_or("");
  if (x == nullptr) return;
  if (quant.empty()) return s.report().Missing(s.info().name + " has no metadata quant", "record it with quant=…");
  auto back = Dequantise(s, name, true);
  if (!back.ok()) return s.report().Missing(back.status().message(), Capture::RecordHint(name + "q_scale"));
  if (back->size() != x->n()) return;
  const auto apart = [&](const Array& y, std::span<const double> of) {
    double error = 0, total = 0;
    const int64_t width = std::max<int64_t>(x->row_size(), 1);
    for (int64_t i = 0; i < y.size(); ++i) {
      // Rows of padding hold anything.
      if (!x->rows.empty() && !x->rows[static_cast<size_t>(i / width)].real()) continue;
      const double v = of[static_cast<size_t>(i)];
      if (!std::isfinite(v) || !std::isfinite(y[i])) continue;
      error += (v - y[i]) * (v - y[i]);
      total += v * v;
    }
    return total > 0 ? std::sqrt(error / total) : 0;
  };
  const auto distance = [&](const Array& y) { return apart(y, x->values); };
  // Rounding to a grid of this coarseness moves a row by about a seventh of its length for four bits at the most.
  const double allowed = quant.find("fp4") != std::string::npos ? 0.3 : quant.starts_with("int8") ? 0.05 : 0.08;
  const double have = distance(*back);
  if (have <= allowed) return s.report().Right(s.info().id, have, allowed);
  // Rows of the input read by another pitch than that of its view.
  const Input siblings[] = {{x->info->name, x}, {s.info().name, s.tensor()}};
  const Readings readings = OtherReadings(s, *x, siblings);
  for (const Reading& way : readings.ways) {
    if (apart(*back, readings.Read(way).values) > allowed) continue;
    return ReportRule(s.capture(), s.report(), s.info(),
                      {fault_class::kStride, "codes come back to " + x->info->name +
                                                 " read from its storage with other strides than those of the view"});
  }
  if (const int64_t wrapped = Wrapped(s, name, *x); wrapped > 0) {
    return ReportRule(s.capture(), s.report(), s.info(),
                      {fault_class::kRange, std::to_string(wrapped) +
                                                " codes beyond the range came out at its other end, all others are "
                                                "right: they wrapped where they should be cut"});
  }
  // Scales that are wrong are named by themselves; here the codes are.
  DequantVariant high;
  high.high_nibble_first = true;
  if (auto other = Dequantise(s, name, true, high); other.ok() && distance(*other) <= allowed) {
    return ReportRule(s.capture(), s.report(), s.info(),
                      {fault_class::kQLayout, "codes come back to the input with the high nibble first"});
  }
  DequantVariant layout;
  layout.other_scale_layout = true;
  if (auto other = Dequantise(s, name, true, layout); other.ok() && distance(*other) <= allowed) {
    Explanation why{fault_class::kQLayout, "codes come back to the input under scales in the other layout"};
    if (const TensorPtr scale = s.Beside(name + "q_scale")) why.blamed = scale->info->id;
    return ReportRule(s.capture(), s.report(), s.info(), why);
  }
  const double ratio = ConstantRatio(*back, ToArray(*x), {}, 0.5);
  Explanation why{fault_class::kQScale, "codes times scales do not come back to the input", ratio,
                  "dequantised / input", 1};
  // One constant on all of them: the codes are right for another scale.
  if (!std::isnan(ratio)) {
    if (const TensorPtr scale = s.Beside(name + "q_scale")) why.blamed = scale->info->id;
  }
  ReportRule(s.capture(), s.report(), s.info(), why);
}

}  // namespace

void JudgeQuantisedInputs(const Capture& capture, CheckReport* report) {
  std::set<std::string> scales, codes;
  for (const std::string& name : capture.Names()) {
    if (name.ends_with(".q_scale")) scales.insert(ParseSiteName(name).stem);
    if (name.ends_with(".q")) {
      // These end in ".q" too, and are queries.
      const std::string stem = ParseSiteName(name).stem;
      if (stem != "attn.q" && stem != "attn.indexer.q") codes.insert(stem);
    }
  }
  const std::vector<std::string_view> scale_stems(scales.begin(), scales.end()), code_stems(codes.begin(), codes.end());
  JudgeStems(capture, report, scale_stems, JudgeGroupScales);
  JudgeStems(capture, report, code_stems, JudgeCodes);
}

}  // namespace assay::check
