// Names of constants that turn up as ratios of wrong to right: log2 e in a log-sum-exp of the wrong base, 1/√d in a
// missing softmax scale, a rank count in a reduction done twice. It names numbers; whether the name is the cause is for
// the caller to say.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

namespace assay::fit {

// A dimension or factor of the model, by the name that a reader knows: {"d", 128}, {"ranks", 4}.
struct NamedNumber {
  std::string name;
  double value = 0;
  bool given = false;  // one of the model's numbers or made of one, no plain constant
};

// Constants that need no dimension (log2 e, ln 2, 2, 1/2, -1, 448/240, powers of two, ...), and for each given number
// x: x, 1/x, √x, 1/√x; x² and 1/x² too for names that hold "yarn" or "mscale". Simple ones first, 1 left out.
std::vector<NamedNumber> KnownConstants(std::span<const NamedNumber> numbers);

// The known constant closest to value, if within max(3 uncertainty, 1e-3 |value|) and 2 % of it. Among several that are
// no farther than max(uncertainty, 1e-4 |value|) from the closest: the first in the list.
std::optional<NamedNumber> NameConstant(double value, double uncertainty, std::span<const NamedNumber> known);
// Its name, and of a plain constant what of the model has that value: "2 = ranks" where there are two. Two such at
// most; empty: none.
std::string ReadingsOf(double value, double uncertainty, std::span<const NamedNumber> known);

}  // namespace assay::fit
