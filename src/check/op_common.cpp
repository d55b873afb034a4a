#include "check/op_common.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "base/number_text.h"
#include "check/op_fitted.h"

namespace assay::op {
namespace {

// Inclusive ranges of positions in any order, neighbours joined.
std::vector<std::pair<int64_t, int64_t>> RangesOf(std::vector<int64_t> positions) {
  std::sort(positions.begin(), positions.end());
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (int64_t p : positions) {
    if (!ranges.empty() && p <= ranges.back().second + 1) {
      ranges.back().second = std::max(ranges.back().second, p);
    } else {
      ranges.emplace_back(p, p);
    }
  }
  return ranges;
}

// Request and positions of the first request among the rows.
void FillRows(FirstBad* bad, const Tensor& tensor, std::span<const int64_t> rows) {
  std::vector<int64_t> positions;
  bool first = true;
  for (int64_t r : rows) {
    if (r < 0 || r >= static_cast<int64_t>(tensor.rows.size())) continue;
    const RowId& id = tensor.rows[static_cast<size_t>(r)];
    if (!id.known) continue;
    if (first) bad->request = id.request;
    first = false;
    if (id.request == bad->request) positions.push_back(id.position);
  }
  bad->positions = RangesOf(std::move(positions));
}

// The rung of the ladder that a cause belongs to, where it is not that of the operation.
std::string_view HypothesisOf(std::string_view cls) {
  if (cls == fault_class::kUnwritten || cls == fault_class::kCompile) return hypothesis::kOutputBuffer;
  if (cls == fault_class::kPadRead) return hypothesis::kPadding;
  if (cls == fault_class::kGraph) return hypothesis::kGraphs;
  if (cls == fault_class::kStride) return hypothesis::kShapes;
  if (cls == fault_class::kTpShard || cls == fault_class::kReduce) return hypothesis::kReductions;
  if (cls == fault_class::kQZero || cls == fault_class::kQScale || cls == fault_class::kQLayout)
    return hypothesis::kQuantised;
  if (cls == fault_class::kLoad) return hypothesis::kWeights;
  if (cls == fault_class::kRange) return hypothesis::kRange;
  if (cls == fault_class::kSpec) return hypothesis::kSpeculation;
  return {};
}

// Confidence 0.95 where an explanation fits, 0.7 where the result is only known to be wrong.
void FillCause(FirstBad* bad, const Explanation& why) {
  bad->cls = std::string(why.cls);
  bad->method = "check: oracle";
  if (!std::isnan(why.constant)) {
    bad->constant_value = why.constant;
    bad->constant = why.meaning;
  }
  if (!why.text.empty()) bad->evidence.push_back(why.text);
  bad->confidence = why.rank >= 2 ? 0.95 : 0.7;
}

}  // namespace

Subject::Subject(const Capture& capture, TensorPtr tensor, CheckReport& report)
    : capture_(capture), tensor_(std::move(tensor)), report_(report), actual_(ToArray(*tensor_)) {
  judged_.assign(static_cast<size_t>(tensor_->n_rows()), 1);
  for (size_t r = 0; r < tensor_->rows.size() && r < judged_.size(); ++r) judged_[r] = tensor_->rows[r].real();
}

TensorPtr Subject::Operand(std::string_view name) const {
  auto loaded = capture_.LoadOperand(info(), name);
  return loaded.ok() ? *loaded : nullptr;
}

TensorPtr Subject::Beside(std::string_view name) const {
  if (TensorPtr before = Operand(name)) return before;
  EventFilter filter;
  filter.step = info().event.step;
  filter.rank = info().event.rank;
  for (EventId id : capture_.Find(name, filter)) {
    if (capture_.Info(id)->audit == "before" || capture_.Info(id)->repeat != info().repeat) continue;
    auto loaded = capture_.Load(id);
    return loaded.ok() ? *loaded : nullptr;
  }
  return nullptr;
}

TensorPtr Subject::Weight(std::string_view name) const {
  auto loaded = capture_.LoadWeight(info(), name);
  return loaded.ok() ? *loaded : nullptr;
}

double Subject::Number(std::string_view key, double otherwise) const {
  return capture_.Number(info(), key).value_or(otherwise);
}
int64_t Subject::Integer(std::string_view key, int64_t otherwise) const {
  return capture_.Integer(info(), key).value_or(otherwise);
}
std::string Subject::Text(std::string_view key, std::string_view otherwise) const {
  return capture_.Text(info(), key).value_or(std::string(otherwise));
}
bool Subject::Flag(std::string_view key, bool otherwise) const {
  return capture_.Text(info(), key) ? capture_.Flag(info(), key) : otherwise;
}

// Keys of the event go before what the recorder saw: accum_dtype and store_dtype say how the operation was computed,
// compute_dtype only how coarse its result is.
oracle::Precision Subject::precision() const {
  const Event& event = info().event;
  const auto declared = [&](std::string_view key, DType otherwise) {
    const DType dtype = ParseDType(Capture::OwnText(info(), key).value_or(""));
    return dtype == DType::kInvalid ? otherwise : dtype;
  };
  DType own = IsFloat(event.compute_dtype) ? event.compute_dtype : event.dtype;
  if (!IsFloat(own)) own = DType::kF32;
  if (own == DType::kF64) own = DType::kF32;  // a wide container says nothing of the arithmetic
  const DType store = declared("store_dtype", own);
  oracle::Precision p = oracle::PrecisionOf(declared("accum_dtype", DType::kF32), store);
  return p;
}

oracle::Array ToArray(const Tensor& tensor) { return {tensor.shape, tensor.values}; }
oracle::Array ToArray(std::vector<int64_t> shape, std::span<const double> values) {
  return {std::move(shape), std::vector<double>(values.begin(), values.end())};
}

// one_store: the result is rounded to its type once, at the end; the error of storing is then relative to the result
// itself and not to the sum of magnitudes of its terms.
double Allowed(const oracle::Computed& right, int64_t i, const oracle::Precision& precision, bool one_store) {
  if (!one_store) return oracle::BoundAt(right, i, precision);
  oracle::Precision sum = precision;
  sum.store = 0;
  const double bound = oracle::BoundAt(right, i, sum);
  return bound + precision.store * (std::abs(right.value[i]) + bound);
}

bool IsComparable(const Subject& subject, const oracle::Computed& right) {
  if (right.value.size() == subject.actual().size()) return true;
  subject.report().Missing(subject.info().name + ": its operands give another shape", "record operands of equal rows");
  return false;
}

Difference Differ(const Subject& subject, const oracle::Computed& right, double slack) {
  return Differ(subject.actual(), right, subject.precision(), subject.judged(), slack, subject.one_store);
}

// actual [rows, …] or [rows, heads, …]; `judged` has one entry a row (empty: all). measured and allowed are relative L2
// distances over the judged rows, so that one element does not decide what is printed.
Difference Differ(const oracle::Array& actual, const oracle::Computed& right, const oracle::Precision& precision,
                  std::span<const char> judged, double slack, bool one_store) {
  Difference d;
  if (actual.size() != right.value.size()) {
    d.ok = false;
    d.worst = std::numeric_limits<double>::infinity();
    return d;
  }
  const int64_t n_rows = std::max<int64_t>(static_cast<int64_t>(judged.size()), 1);
  const int64_t width = actual.size() / n_rows;
  const bool has_heads = actual.rank() == 3;
  d.n_columns = has_heads ? std::max<int64_t>(actual.cols(), 1) : width;
  std::vector<char> columns(static_cast<size_t>(d.n_columns), 0);
  std::vector<char> heads(has_heads ? static_cast<size_t>(actual.shape[1]) : 0, 0);
  double error_sq = 0, right_sq = 0, bound_sq = 0;
  for (int64_t r = 0; r < n_rows; ++r) {
    if (!judged.empty() && !judged[static_cast<size_t>(r)]) continue;
    bool bad = false;
    for (int64_t c = 0; c < width; ++c) {
      const int64_t i = r * width + c;
      const double got = actual[i], want = right.value[i];
      double ratio = 0;
      if (!std::isfinite(got) || !std::isfinite(want)) {
        if (got == want || (std::isnan(got) && std::isnan(want))) continue;
        // Only this way round: a finite value where the right one is not finite is wrong too, but has no source to look
        // for.
        if (std::isfinite(want)) d.nonfinite = true;
        ratio = std::numeric_limits<double>::infinity();
      } else {
        d.any_finite = true;
        const double error = std::abs(got - want), bound = Allowed(right, i, precision, one_store) * slack;
        error_sq += error * error;
        right_sq += want * want;
        if (std::isfinite(bound)) bound_sq += bound * bound;
        if (error == 0) continue;
        ratio = bound > 0 ? error / bound : std::numeric_limits<double>::infinity();
      }
      d.worst = std::max(d.worst, ratio);
      if (ratio <= 1) continue;
      bad = true;
      columns[static_cast<size_t>(c % d.n_columns)] = 1;
      if (has_heads) heads[static_cast<size_t>(c / d.n_columns)] = 1;
    }
    if (bad) d.rows.push_back(r);
  }
  const auto set = [](const std::vector<char>& of, std::vector<int64_t>* to) {
    for (size_t i = 0; i < of.size(); ++i) {
      if (of[i]) to->push_back(static_cast<int64_t>(i));
    }
  };
  set(heads, &d.heads);
  set(columns, &d.columns);
  d.ok = d.rows.empty();
  if (right_sq > 0) {
    d.measured = std::sqrt(error_sq / right_sq);
    d.allowed = std::sqrt(bound_sq / right_sq);
  } else {
    d.measured = std::sqrt(error_sq);
  }
  return d;
}

// No rounding is allowed: copies and moves.
Difference DifferExactly(const oracle::Array& actual, const oracle::Array& right, std::span<const char> judged) {
  oracle::Computed exact;
  exact.value = right;
  exact.scale = oracle::Array::Filled(right.shape, 0);
  oracle::Precision none;
  none.accum = none.store = 0;
  return Differ(actual, exact, none, judged);
}

bool Fits(const Subject& subject, const Result<oracle::Computed>& candidate, double slack) {
  if (!candidate.ok()) return false;
  return Differ(subject, *candidate, slack).ok;
}

// Least squares for the constant, then every row has to agree with it relative to its own largest element: a few rows
// off are no constant. 1 ± 0.001 and 0 are none.
double ConstantRatio(const oracle::Array& actual, const oracle::Array& right, std::span<const char> judged,
                     double tolerance) {
  if (actual.size() != right.size() || actual.size() == 0) return kNone;
  const int64_t n_rows = std::max<int64_t>(static_cast<int64_t>(judged.size()), 1);
  const int64_t width = actual.size() / n_rows;
  const auto counts = [&](int64_t i) { return judged.empty() || judged[static_cast<size_t>(i / width)]; };
  double cross = 0, square = 0;
  for (int64_t i = 0; i < actual.size(); ++i) {
    if (!counts(i)) continue;
    if (!std::isfinite(actual[i]) || !std::isfinite(right[i])) return kNone;
    cross += actual[i] * right[i];
    square += right[i] * right[i];
  }
  if (square == 0) return kNone;
  const double c = cross / square;
  if (std::abs(c - 1) <= 1e-3 || c == 0) return kNone;
  for (int64_t r = 0; r < n_rows; ++r) {
    double top = 0, error = 0;
    if (!counts(r * width)) continue;
    for (int64_t i = r * width; i < (r + 1) * width; ++i) {
      top = std::max(top, std::abs(c * right[i]));
      error = std::max(error, std::abs(actual[i] - c * right[i]));
    }
    if (error > tolerance * top) return kNone;
  }
  return c;
}

// NaN for NaN shows nothing of how it came about.
void ReportRight(const Subject& subject, const Difference& difference) {
  if (!difference.any_finite && subject.actual().size() > 0) {
    return subject.report().Missing(subject.info().name + " and what is due there hold no finite number",
                                    "see what nonfinite says of its operands");
  }
  subject.report().Right(subject.info().id, difference.measured, difference.allowed);
}

namespace {

// Which columns are wrong, where not all are; "" else.
std::string ColumnsText(const Difference& d) {
  const auto n = static_cast<int64_t>(d.columns.size());
  if (n == 0 || n == d.n_columns) return "";
  std::string text = ", columns";
  if (n > 2 && d.columns.back() - d.columns.front() == n - 1) {
    text += " " + std::to_string(d.columns.front()) + "-" + std::to_string(d.columns.back());
  } else if (n <= 8) {
    for (int64_t c : d.columns) text += (c == d.columns[0] ? " " : ",") + std::to_string(c);
  } else {
    text = ", " + std::to_string(n) + " of its columns, the first one " + std::to_string(d.columns[0]) + ",";
  }
  return text + " of " + std::to_string(d.n_columns);
}

// Of so few numbers a constant or two explain any: 40 bits are asked, and one float has 24.
constexpr int64_t kLeastForAConstant = 4;

Explanation Proved(const Subject& subject, const Explanation& why) {
  const auto rows = std::max<int64_t>(static_cast<int64_t>(subject.judged().size()), 1);
  const int64_t judged = subject.judged().empty() ? 1 : std::count(subject.judged().begin(), subject.judged().end(), 1);
  const int64_t n = subject.actual().size() / rows * judged;
  if (std::isnan(why.constant) || n >= kLeastForAConstant) return why;
  return {fault_class::kKernel, "the operation is wrong on the operands as recorded; " + std::to_string(n) +
                                    " numbers are too few to tell a cause by"};
}

}  // namespace

void ReportWrong(const Subject& subject, const Difference& difference, const Explanation& found) {
  const Explanation why = Proved(subject, found);
  Suspicion s;
  s.event = why.blamed == kNoEvent ? subject.info().id : why.blamed;
  s.rank = why.rank;
  s.bad.measured = difference.measured;
  s.bad.bound = difference.allowed;
  const oracle::Precision p = subject.precision();
  s.bad.bound_basis = "relative L2 of what the declared precision allows: sums at 2^" +
                      std::to_string(std::ilogb(p.accum)) + ", result at 2^" + std::to_string(std::ilogb(p.store));
  FillRows(&s.bad, *subject.tensor(), difference.rows);
  for (int64_t h : difference.heads) s.bad.heads.push_back(static_cast<int32_t>(h));
  FillCause(&s.bad, why);
  if (const std::string name = ConstantName(subject, difference, why); !name.empty()) {
    s.bad.constant += " (" + name + ")";
    if (why.text.find("(" + name + ")") == std::string::npos) s.bad.evidence.push_back("the constant is " + name);
  }
  s.hypothesis = HypothesisOf(why.cls);
  s.bad.evidence.push_back("operands as recorded give another result: relative distance " +
                           NumberText(difference.measured) + ", allowed " + NumberText(difference.allowed) +
                           ", worst element " + NumberText(difference.worst) + " times its bound, in " +
                           std::to_string(difference.rows.size()) + " of " + std::to_string(subject.judged().size()) +
                           " rows" + ColumnsText(difference));
  if (!subject.sample.empty()) s.bad.evidence.push_back(subject.sample);
  subject.report().Found(std::move(s));
}

void ReportRule(const Capture& capture, CheckReport& report, const EventInfo& info, const Explanation& why,
                std::span<const int64_t> rows) {
  Suspicion s;
  s.event = why.blamed == kNoEvent ? info.id : why.blamed;
  s.rank = why.rank;
  s.bad.bound_basis = "exact rule";
  if (auto tensor = capture.Load(info.id); tensor.ok()) FillRows(&s.bad, **tensor, rows);
  FillCause(&s.bad, why);
  s.hypothesis = HypothesisOf(why.cls);
  report.Found(std::move(s));
}

// Every event of these stems that has values, in order of execution for each name; judge() writes the verdict.
void JudgeStems(const Capture& capture, CheckReport* report, std::span<const std::string_view> stems,
                const JudgeFunction& judge, bool at_load) {
  for (std::string_view stem : stems) {
    for (const std::string& name : capture.NamesOfStem(stem)) {  // ".partial" is a part of the stem
      const std::span<const EventId> events = capture.EventsOf(name);
      for (size_t i = 0; i < events.size(); ++i) {
        const EventId id = events[i];
        const auto info = capture.Info(id);
        if (info->audit == "before" || info->audit == "read") continue;
        if ((info->event.phase == Phase::kLoad) != at_load) continue;
        auto tensor = capture.Load(id);
        if (!tensor.ok()) {
          // Where nothing has values the rest of a name is counted unseen: it is like the first.
          const size_t alike = capture.has_payloads() ? 1 : events.size() - i;
          report->Missing(tensor.status().message(), Capture::RecordHint(name), alike);
          i += alike - 1;
          continue;
        }
        if ((*tensor)->sampled) continue;  // rows of operands would have to be the same sample
        Subject subject(capture, *tensor, *report);
        judge(subject);
      }
    }
  }
}

Status NotRecorded(const std::string& name) { return Status::BadInput(name + " was not recorded as payload"); }
void Missing(const Subject& subject, std::string_view name) {
  subject.report().Missing(subject.info().name + ": " + NotRecorded(std::string(name)).message(),
                           Capture::RecordHint(name));
}
void Missing(const Subject& subject, const Status& why) {
  subject.report().Missing(subject.info().name + ": " + why.message(),
                           "record what is named there as docs/adding-a-case.md has it, with ASSAY_LEVEL=payload");
}

uint64_t AddressOf(const Event& event) {
  if (event.base_address == 0) return 0;
  return event.base_address + static_cast<uint64_t>(event.storage_offset * BitsOf(event.dtype) / 8);
}

// Padding matches padding, whatever it is said to belong to.
bool SameRows(const Tensor& a, const Tensor& b) {
  if (a.rows.size() != b.rows.size()) return false;
  for (size_t r = 0; r < a.rows.size(); ++r) {
    if (a.rows[r].request != b.rows[r].request || a.rows[r].position != b.rows[r].position ||
        a.rows[r].real() != b.rows[r].real()) {
      return false;
    }
  }
  return true;
}

// Where each wanted row stands; nullopt when one is missing or is no row of a request.
std::optional<std::vector<int64_t>> FindRows(std::span<const RowId> have, std::span<const RowId> want) {
  std::map<std::pair<uint64_t, int64_t>, int64_t> row_of;
  for (size_t r = 0; r < have.size(); ++r) {
    if (have[r].real()) row_of[{have[r].request, have[r].position}] = static_cast<int64_t>(r);
  }
  std::vector<int64_t> rows;
  for (const RowId& id : want) {
    const auto at = row_of.find({id.request, id.position});
    if (!id.real() || at == row_of.end()) return std::nullopt;
    rows.push_back(at->second);
  }
  return rows;
}

// A tensor with the rows of another, in its order; the same object when they are equal, null when one is missing.
TensorPtr WithRowsOf(const TensorPtr& tensor, const Tensor& like) {
  if (SameRows(*tensor, like)) return tensor;
  const auto rows = FindRows(tensor->rows, like.rows);
  if (!rows) return nullptr;
  auto part = std::make_shared<Tensor>(*tensor);
  part->rows = like.rows;
  part->shape[0] = static_cast<int64_t>(rows->size());
  part->values.clear();
  part->row_numbers.clear();
  part->bytes = {};
  for (int64_t r : *rows) {
    part->values.insert(part->values.end(), tensor->row(r).begin(), tensor->row(r).end());
    part->row_numbers.push_back(tensor->row_numbers[static_cast<size_t>(r)]);
  }
  return part;
}

}  // namespace assay::op
