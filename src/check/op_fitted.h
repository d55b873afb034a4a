// What src/fit says of a wrong result: how surely a cause that fits is no accident, and the small explanations that are
// tried where none of the operation's own causes fits.
//
// It only ever looks at results that are wrong by their bound: a right one never comes here.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>

#include "check/op_explain.h"

namespace assay::op {

// Fits (within four bounds) and is at least twice as near as the right result: where that is off by a few bounds alone,
// anything near it would fit.
bool FitsBetter(const Subject& subject, const oracle::Computed& right, const Result<oracle::Computed>& candidate);
// "residual 3.1e-08 (0.42 without), 1733 bits beyond chance", of a candidate for the wrong result; empty where fit does
// not count it as an explanation.
std::string WeightOf(const Subject& subject, const oracle::Computed& right, const oracle::Computed& candidate);
// The explanation with that in its text.
Explanation Weighed(const Subject& subject, const oracle::Computed& right, const oracle::Computed& candidate,
                    Explanation why);

// The explanation weighed so where its constant is a factor of the whole result, and it has not been weighed yet.
Explanation WeighedFactor(const Subject& subject, const oracle::Computed& right, Explanation why);
// "log2 e", "1/sqrt(head size)", "1/yarn mscale^2": what the constant of the explanation, a ratio, is known as. Empty:
// it is none of the known ones, or no ratio.
std::string ConstantName(const Subject& subject, const Difference& difference, const Explanation& why);

// The best small explanation between the right result and the recorded one: constants, rows, heads or columns moved,
// rows of an earlier step, a tensor of the layer in its place or added to it, zeros, coarser values. Class KERNEL where
// one fits that tells no class; nullopt: no explanation. quantised: an operand was decoded from codes, so that
// constants and places are those of its scales and codes.
std::optional<Explanation> ExplainByFit(const Subject& subject, const oracle::Computed& right,
                                        std::span<const Input> operands, bool quantised = false);

// Causes of several events of this name have been looked for: more of them would cost time and say the same.
bool SearchedEnough(const Subject& subject);

// A product x wᵀ + bias looked at in a few elements with twice the allowance: false where it cannot be the result. Row
// r of the result is row x_first + r of x, column c row w_first + c of w. True where the shapes do not say.
bool ProductMayFit(const Subject& subject, const oracle::Array& x, int64_t x_first, const oracle::Array& w,
                   int64_t w_first, const oracle::Array& bias);

// The same of operands that are made row by row, as far as they are looked at.
struct OperandRows {
  int64_t rows = 0, cols = 0;
  std::function<double(int64_t row, int64_t col)> at;
};
bool ProductMayFit(const Subject& subject, const oracle::Array& x, int64_t x_first, const OperandRows& w,
                   int64_t w_first, const oracle::Array& bias);
bool ProductMayFit(const Subject& subject, const OperandRows& x, int64_t x_first, const oracle::Array& w,
                   int64_t w_first, const oracle::Array& bias);

}  // namespace assay::op
