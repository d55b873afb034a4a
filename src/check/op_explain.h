// Causes that any operation can have: a graph that reads what has moved, an operand read with other strides, an operand
// that was written over, memory that is not finite, a rounding coarser than declared.
//
// Each is tried by recomputing the operation with what would have been read, and counts only when the recomputed result
// fits the recorded one to rounding. What is peculiar to one operation is in its own file.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "check/op_common.h"

namespace assay::op {

// An operand and how the operation follows from all of them.
struct Input {
  std::string name;  // full
  TensorPtr tensor;  // null: unused, its array is empty
};
struct Operation {
  std::vector<Input> inputs;
  std::function<Result<oracle::Computed>(std::span<const oracle::Array>)> run;  // arrays in the order of inputs
  bool quantised = false;  // an operand is decoded from codes (its value is none of the inputs)
  // A tensor that may have taken part and was not recorded: a result that no cause explains is not testable then.
  std::string lacking = {};

  std::vector<oracle::Array> arrays() const;
  Result<oracle::Computed> Run() const { return run(arrays()); }
};

// Fits `right`? Else the first explanation of those below, then what `own` finds, then PRECISION, then what fit finds
// (op_fitted.h), and KERNEL.
// Writes the verdict. `own` may return nothing.
using OwnExplanations = std::function<std::optional<Explanation>(const Difference&, const oracle::Computed& right)>;
void JudgeOperation(const Subject& subject, const Operation& operation, const OwnExplanations& own);

// The causes by themselves.
std::optional<Explanation> ExplainGraph(const Subject& subject, const Operation& operation);
std::optional<Explanation> ExplainStrides(const Subject& subject, const Operation& operation);
std::optional<Explanation> ExplainOverwritten(const Subject& subject, const Operation& operation);
std::optional<Explanation> ExplainNonFinite(const Subject& subject, const Operation& operation, const Difference& d,
                                            bool row_by_row);
std::optional<Explanation> ExplainUnwritten(const Subject& subject);
// Zeros in the place of all numbers below a threshold, and of no others.
std::optional<Explanation> ExplainFlushed(const Subject& subject, const oracle::Computed& right);
// Bit for bit what the same result of another layer holds in this step (a buffer that layers share), or this rank's
// partial result where the sum over ranks is due.
std::optional<Explanation> ExplainOtherBuffer(const Subject& subject, const Difference& d);
// `fit`: how far the result is from the right one by the coarser precision that explains it. `usual`: whether sums in
// that type usually are off by as much; left out: by a rule for sums of products.
std::optional<Explanation> ExplainPrecision(const Subject& subject, const oracle::Computed& right,
                                            Difference* fit = nullptr, const std::function<bool(DType)>& usual = {});

// The event of `name` whose first element lies at the address that metadata bound.NAME gives, where that is not where
// the operand is now; kNoEvent when nothing moved. `moved` tells whether the addresses differ.
EventId BoundEvent(const Subject& subject, const std::string& name, EventId operand, bool* moved);

// The flat memory behind a view, recorded beside it; null when it was not.
TensorPtr StorageOf(const Subject& subject, const EventInfo& view);
// Ways in which the memory behind a view may be read. Values are made one way at a time: each takes the memory of the
// view.
struct Reading {
  std::vector<int64_t> strides;  // in elements
  bool from_beginning = false;   // of the storage, not from where the view begins
  auto operator<=>(const Reading&) const = default;
};
struct Readings {
  TensorPtr storage;           // null: not recorded, and no ways
  std::vector<int64_t> shape;  // of the view
  int64_t offset = 0;          // of its first element in the storage
  std::vector<Reading> ways;   // at most 128; every place lies inside of the storage
  oracle::Array Read(const Reading& by) const;
};
// Strides of the view mixed with those of its siblings, and rows as far apart as the result's, a sibling's, or those of
// the siblings side by side are wide; all of them from where the view begins, then the view's own and these from the
// storage's beginning. Strides and shapes come from the file and may be anything.
Readings OtherReadings(const Subject& subject, const Tensor& view, std::span<const Input> siblings);

}  // namespace assay::op
