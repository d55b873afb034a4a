// Small least-squares problems by their normal equations: a row's numbers as a sum of others', scales of groups from
// the results that they enter. Squaring the problem costs half of the digits, which leaves more than the constants
// need.
#pragma once

#include <span>
#include <vector>

namespace assay::fit {

// Solves a x = b in place of b by elimination; a [n, n], symmetric and positive semidefinite as normal equations are,
// so that no exchange of rows is needed, is used up. NaN for an unknown that the equations leave open: its pivot has
// lost ten digits, so that it would be a guess.
void SolveSymmetric(std::span<double> a, std::span<double> b);

// c with y ≈ Σ_j c_j terms[j], terms of y's length; empty when they are not independent or not finite.
std::vector<double> SolveLeastSquares(std::span<const double> y, std::span<const std::span<const double>> terms);

}  // namespace assay::fit
