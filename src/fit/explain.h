// Small explanations of why an array is not what it should be: fitted, ranked, and weighed against chance.
//
// Between `expected` (an oracle, another run) and `actual` every kind below is tried; each that fits comes back with
// its parameters, its constant and how surely it is no accident. "No explanation" is an answer. Pure numbers: what a
// fit means for the model (which class of fault) is for the caller to say.
//
// What counts as fitting: of the elements that expected does not explain (beyond their bound), and those that the
// explanation would break, nearly all are within their bound of the fitted model. How sure: the chance that an
// unrelated model would do as well, from how often the model's values meet the bound at *other* elements of actual
// (Chernoff), in bits, less the bits that the explanation itself costs. docs/numerics.md, "Fitted causes", derives
// both.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "fit/constants.h"

namespace assay::fit {

enum class Kind : uint8_t {
  kCandidate,     // equals an array that the caller computed
  kScale,         // constant · expected
  kScaleOfSome,   // constant · expected in some rows, heads, columns or blocks; the rest is right
  kScaleEach,     // another constant for each row, head, column or block
  kCombination,   // a · R + b · S of two named arrays
  kAdded,         // expected + constant · a named array
  kOffset,        // expected + constant
  kOffsetOfSome,  // expected + one constant a row or a column (an unknown bias)
  kRowsMoved,     // rows (of axis 0) of expected in another order, or repeated
  kHeadsMoved,    // the same for heads
  kColumnsMoved,  // the same for columns within a head
  kInterleaved,   // columns: halves where interleaved pairs are expected, or the reverse
  kTransposed,    // axes swapped: rows and heads, or heads and columns
  kOtherStride,   // expected read with another row pitch (a reshape that is none)
  kRowsOf,        // rows equal rows of a named array (an earlier step, another request)
  kZero,          // rows (heads) that are all zero
  kConstantRows,  // rows each of one value
  kCoarser,       // expected rounded to a coarser format
  kSaturated,     // expected cut at a largest magnitude
};
std::string_view NameOf(Kind kind);  // "scale", "rows moved", ...

// What groups share a constant, or move.
enum class Axis : uint8_t { kAll, kRow, kHead, kColumn, kBlock };
std::string_view NameOf(Axis axis);

// Something that actual may be, hold a part of, or take rows from. Nothing is owned: the spans must outlive Explain. An
// array with another number of rows (as_rows) must be neither candidate nor term.
struct NamedArray {
  std::string name;
  std::span<const double> values;      // one an element of `actual`; kRowsOf: any number of rows of the same width
  std::span<const double> bound = {};  // absolute, an element; none: that of the problem
  bool as_candidate = true;            // tried as kCandidate
  bool as_term = false;                // tried in kCombination and kAdded (a shared expert, a bias broadcast to rows)
  bool as_rows = false;                // tried in kRowsOf
};
// Elements are row-major [rows, heads, cols]. Only elements that should be compared: leave padding rows out.
struct Problem {
  std::span<const double> expected, actual;
  std::span<const double> bound;  // absolute rounding bound of each element, 0 allowed; size of expected or 1
  int64_t rows = 0, heads = 1, cols = 0;
  int64_t block_rows = 0, block_cols = 0;  // tiles of a quantised weight, 0: none (rows by heads · cols)
  std::vector<NamedArray> arrays;
  std::vector<NamedNumber> numbers;  // dimensions and factors by which constants are named: {"d", 128}, ...
};

struct Options {
  double slack = 2;                  // times the bound, for model and actual each have theirs
  double hit_share = 0.9;            // of the elements to be explained
  double least_bits = 40;            // significance that counts: one chance in 2^40, after the price of the explanation
  int64_t least_support = 4;         // elements explained beyond the free parameters
  double parameter_bits = 16;        // price of a free parameter; half of it when it is a known constant or an integer
  double fitted_roundoff = 0x1p-22;  // relative slack of models with a fitted constant, where the bound is smaller
};

struct Explanation {
  Kind kind = Kind::kScale;
  Axis axis = Axis::kAll;
  std::string parameters = {};            // "heads 1, 3: 1.4427", "row t is row t + 1", "rows of step 3"
  std::string array = {};                 // name of the array used, if any
  std::optional<double> constant = {};    // the fitted one; kCombination: that of the second array
  std::optional<double> constant_a = {};  // kCombination: of the first
  double uncertainty = 0;                 // of the constant, absolute
  std::string constant_name = {};         // "log2 e", "2 = ranks"; empty: none of the known ones
  double named_value = 0;                 // of constant_name
  std::vector<double> factors = {};       // kScaleEach, kOffsetOfSome: of each of members
  std::vector<int64_t> members =
      {};                       // rows, heads, columns, blocks concerned; kRowsMoved ...: source of each, -1 itself
  double residual = 0;          // |actual - model| / |actual|
  int64_t free_parameters = 0;  // numbers that were fitted
  int64_t support = 0;          // elements explained that expected does not explain, less the free parameters
  double significance = 0;      // bits beyond chance and price
  double cost = 0;              // what ranks: residual and price in bits, less is better
};

struct Answer {
  int64_t count = 0;               // elements
  int64_t wrong = 0;               // beyond the bound of expected: what there is to explain
  double residual = 0;             // |actual - expected| / |actual|
  bool within_noise = false;       // nothing to explain
  std::vector<Explanation> found;  // best first; empty: no explanation
};
// kBadInput when sizes do not fit.
Result<Answer> Explain(const Problem& problem, const Options& options = {});

}  // namespace assay::fit
