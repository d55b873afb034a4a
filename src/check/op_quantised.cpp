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
  const auto distance = [&](const Array& y) {
    double error = 0, total = 0;
    const int64_t width = std::max<int64_t>(x->row_size(), 1);
    for (int64_t i = 0; i < y.size(); ++i) {
      // Rows of padding hold anything.
      if (!x->rows.empty() && !x->rows[static_cast<size_t>(i / width)].real()) continue;
      const double v = x->values[static_cast<size_t>(i)];
      if (!std::isfinite(v) || !std::isfinite(y[i])) continue;
      error += (v - y[i]) * (v - y[i]);
      total += v * v;
    }
    return total > 0 ? std::sqrt(error / total) : 0;
  };
  // Rounding to a grid of this coarseness moves a row by about a seventh of its length for four bits at the most.
  const double allowed = quant.find("fp4") != std::string::npos ? 0.3 : quant.starts_with("int8") ? 0.05 : 0.08;
  const double have = distance(*back);
  if (have <= allowed) return s.report().Right(s.info().id, have, allowed);
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
