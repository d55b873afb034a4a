// Operands that were rounded before the operation, as tensor cores do with f32 ones: the result follows from the
// rounded operands as exactly as it should from the recorded ones.
#include "check/op_coarse_operands.h"

#include <cmath>
#include <string>
#include <vector>

#include "check/op_fitted.h"
#include "fit/formats.h"

namespace assay::op {
namespace {

// Exponents of f32, 10 stored bits of the mantissa; the rest of 32 bits is cut or rounded by the hardware.
constexpr fit::Format kTf32{"tf32", 11, -136, 0x1.ffcp127};

// Toward zero, as hardware does that reads the upper bits alone.
double Cut(double x, const fit::Format& format) {
  if (!std::isfinite(x) || x == 0) return x;
  const double spacing = fit::SpacingAt(x, format);
  return std::trunc(x / spacing) * spacing;
}

}  // namespace

std::optional<Explanation> ExplainCoarseOperands(const Subject& subject, const Operation& operation,
                                                 const oracle::Computed& right) {
  if (SearchedEnough(subject)) return std::nullopt;
  std::vector<fit::Format> formats = {kTf32};
  for (const fit::Format& f : fit::Formats()) {
    if (f.name == "f16" || f.name == "bf16") formats.push_back(f);
  }
  const std::vector<oracle::Array> arrays = operation.arrays();
  const size_t n = arrays.size();
  for (const fit::Format& format : formats) {
    for (const bool cut : {false, true}) {
      std::vector<oracle::Array> rounded = arrays;
      std::vector<size_t> changed;
      for (size_t i = 0; i < n; ++i) {
        const TensorPtr& t = operation.inputs[i].tensor;
        if (t == nullptr || !IsFloat(t->info->event.dtype)) continue;
        for (double& x : rounded[i].values) x = cut ? Cut(x, format) : fit::RoundTo(x, format);
        if (rounded[i].values != arrays[i].values) changed.push_back(i);
      }
      // All of them together, then one alone.
      for (size_t which = 0; which <= changed.size() && !changed.empty(); ++which) {
        if (which > 0 && changed.size() == 1) break;
        std::vector<oracle::Array> in = arrays;
        std::string names;
        for (size_t j = 0; j < changed.size(); ++j) {
          if (which > 0 && which != j + 1) continue;
          in[changed[j]] = rounded[changed[j]];
          const std::string& name = operation.inputs[changed[j]].name;
          names += (names.empty() ? "" : " and ") + name;
        }
        const auto y = operation.run(in);
        if (!FitsBetter(subject, right, y)) continue;
        return Weighed(subject, right, *y,
                       {fault_class::kPrecision, "fits " + names + (cut ? " cut to " : " rounded to ") +
                                                     std::string(format.name) + " before the operation"});
      }
    }
  }
  return std::nullopt;
}

}  // namespace assay::op
