// What the checks of single operations share: the result under judgement, its operands, the bound, and how a verdict is
// handed in.
//
// An operation is judged by itself: operands as recorded go through the oracle in float64, the result is compared row
// by row with the bound of its declared precision. A wrong operand is the business of the operation that made it. What
// makes a wrong result is looked for in op_explain.h; each op_<operation>.cpp adds the causes that are its own.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "capture/capture.h"
#include "check/check.h"
#include "oracle/bound.h"

namespace assay::op {

inline constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

// A cause that fits, ready to be printed.
struct Explanation {
  std::string_view cls;
  std::string text;           // "fits with the other pairing: interleaved used, half declared"
  double constant = kNone;    // NaN: the class has none
  std::string meaning{};      // "softmax scale used / declared"
  int rank = 2;               // Suspicion::rank
  EventId blamed = kNoEvent;  // another event than the result: an operand that is the source
};

// One result and what is known of it. The rows that count are those of requests; without token rows all of them.
class Subject {
 public:
  Subject(const Capture& capture, TensorPtr tensor, CheckReport& report);

  const Capture& capture() const { return capture_; }
  const EventInfo& info() const { return *tensor_->info; }
  const TensorPtr& tensor() const { return tensor_; }
  CheckReport& report() const { return report_; }
  const oracle::Array& actual() const { return actual_; }
  const std::vector<char>& judged() const { return judged_; }  // one an index of axis 0
  void LeaveOut(int64_t row) { judged_[static_cast<size_t>(row)] = 0; }
  std::string Sibling(std::string_view stem) const { return info().prefix + std::string(stem); }

  // By full name; null when it was not recorded, or not as payload.
  TensorPtr Operand(std::string_view name) const;
  TensorPtr Weight(std::string_view name) const;
  // A second result of the same operation: as Operand, else the first event of the step behind this one.
  TensorPtr Beside(std::string_view name) const;

  // Metadata with the defaults of the contract.
  double Number(std::string_view key, double otherwise) const;
  int64_t Integer(std::string_view key, int64_t otherwise) const;
  std::string Text(std::string_view key, std::string_view otherwise) const;
  bool Flag(std::string_view key, bool otherwise) const;

  // accum_dtype and store_dtype; left out: f32 and the event's compute dtype (its own dtype without one).
  oracle::Precision precision() const;
  // The declared accumulator holds every term, and storing rounds once: set by sums of products whose event declares
  // accum_dtype. Otherwise terms may have been rounded to the storing type, as usual kernels do.
  bool one_store = false;
  void DeclareOneStore() { one_store = Capture::OwnText(info(), "accum_dtype").has_value(); }
  // Where this is a part of a recorded result: which, for the evidence.
  std::string sample = {};

 private:
  const Capture& capture_;
  TensorPtr tensor_;
  CheckReport& report_;
  oracle::Array actual_;
  std::vector<char> judged_;
};

oracle::Array ToArray(const Tensor& tensor);
oracle::Array ToArray(std::vector<int64_t> shape, std::span<const double> values);

// Where and by how much a result parts from what it should be.
struct Difference {
  bool ok = true;
  double worst = 0;            // largest error / bound, infinite for a wrong non-finite element
  double measured = 0;         // relative L2 of the judged rows
  double allowed = 0;          // L2 of the bounds over that of the right values
  std::vector<int64_t> rows;   // that hold an element beyond its bound
  std::vector<int64_t> heads;  // index of axis 1 of such elements, for results of rank 3
  // Places in the last axis of such elements, and how many there are.
  std::vector<int64_t> columns;
  int64_t n_columns = 0;
  bool nonfinite = false;   // an element is not finite where it should be
  bool any_finite = false;  // a judged element and the right one are finite
};
// one_store: the last rounding to the storing type alone counts, relative to the value.
Difference Differ(const oracle::Array& actual, const oracle::Computed& right, const oracle::Precision& precision,
                  std::span<const char> judged, double slack = 1, bool one_store = false);
Difference Differ(const Subject& subject, const oracle::Computed& right, double slack = 1);
// As many numbers as the result has. False, after a report: the operands are of other rows, heads or columns than the
// result, and nothing can be held against each other.
bool IsComparable(const Subject& subject, const oracle::Computed& right);
// Allowed error of element i.
double Allowed(const oracle::Computed& right, int64_t i, const oracle::Precision& precision, bool one_store);
// The same for values that must be equal.
Difference DifferExactly(const oracle::Array& actual, const oracle::Array& right, std::span<const char> judged);

// The candidate explains the result: within `slack` bounds in every judged row.
bool Fits(const Subject& subject, const Result<oracle::Computed>& candidate, double slack = 4);

// One constant c, away from 1, with actual = c · right in all judged rows to `tolerance`; NaN: none.
double ConstantRatio(const oracle::Array& actual, const oracle::Array& right, std::span<const char> judged,
                     double tolerance);

// Hands in the verdict: Right, or a suspicion with rows, positions, heads, bound and evidence.
void ReportRight(const Subject& subject, const Difference& difference);
void ReportWrong(const Subject& subject, const Difference& difference, const Explanation& why);
// Both of a shape, a rule without numbers ("slots changed that nobody mapped").
void ReportRule(const Capture& capture, CheckReport& report, const EventInfo& info, const Explanation& why,
                std::span<const int64_t> rows = {});

// Calls `judge` for each recorded result of these stems (without the layer), in the order of recording. Looks before
// and after the operation (audit=before, read) and events of phase load are left out. Events without payload are
// reported as missing once a site.
using JudgeFunction = std::function<void(Subject&)>;
void JudgeStems(const Capture& capture, CheckReport* report, std::span<const std::string_view> stems,
                const JudgeFunction& judge, bool at_load = false);
// "NAME was not recorded" with what to capture; or why what was recorded will not do.
Status NotRecorded(const std::string& name);
void Missing(const Subject& subject, std::string_view name);
void Missing(const Subject& subject, const Status& why);

// First element's address: base + offset; 0 when there is no base.
uint64_t AddressOf(const Event& event);
// Whether both hold the same rows (request, position, padding) in the same order.
bool SameRows(const Tensor& a, const Tensor& b);
// For each row of `want` its number in `have`, by request and position; nullopt when one is not there or is not known.
std::optional<std::vector<int64_t>> FindRows(std::span<const RowId> have, std::span<const RowId> want);
// The rows of `tensor` that `like` has, in the order of `like`: a kernel may have been given a part of a step's rows.
// nullptr when one of them is not there or is not known.
TensorPtr WithRowsOf(const TensorPtr& tensor, const Tensor& like);

}  // namespace assay::op
