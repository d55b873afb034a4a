// Bookkeeping: positions and lengths of a step, what a verifying step accepted, and the state that linear attention
// keeps of it.
#include <algorithm>
#include <cmath>

#include "check/op_checks.h"
#include "check/op_explain.h"
#include "oracle/linear_attention.h"

namespace assay::check {
namespace {

using namespace op;
using oracle::Array;

TensorPtr OfStep(const Subject& s, std::string_view name, int64_t step) {
  EventFilter filter;
  filter.step = step;
  TensorPtr found;
  for (EventId id : s.capture().Find(name, filter)) {
    const auto info = s.capture().Info(id);
    if (info->event.rank != s.info().event.rank && found != nullptr) continue;
    if (auto t = s.capture().Load(id); t.ok()) found = *t;
  }
  return found;
}

// Value of a request's row.
std::optional<double> OfRequest(const Tensor& t, uint64_t request) {
  for (size_t r = 0; r < t.rows.size() && r < t.values.size(); ++r) {
    if (t.rows[r].real() && t.rows[r].request == request) return t.values[r];
  }
  return std::nullopt;
}

void JudgePositions(Subject& s) {
  std::vector<int64_t> rows;
  for (int64_t r = 0; r < s.tensor()->n_rows(); ++r) {
    if (s.judged()[static_cast<size_t>(r)] && !s.tensor()->rows.empty() &&
        s.actual()[r * std::max<int64_t>(s.tensor()->row_size(), 1)] !=
            static_cast<double>(s.tensor()->rows[static_cast<size_t>(r)].position)) {
      rows.push_back(r);
    }
  }
  if (s.tensor()->rows.empty() || s.tensor()->row_size() != 1) return;
  if (rows.empty()) return s.report().Right(s.info().id);
  // Ahead by the drafts of the step before that were not accepted.
  const TensorPtr accepted = OfStep(s, "spec.accepted", s.info().event.step - 1);
  bool drafts_off = accepted != nullptr;
  const auto drafts = s.capture().Integer(s.info(), "drafts");
  bool one_offset = true;
  const double first =
      s.actual()[rows[0]] - static_cast<double>(s.tensor()->rows[static_cast<size_t>(rows[0])].position);
  for (int64_t r : rows) {
    const RowId& id = s.tensor()->rows[static_cast<size_t>(r)];
    const double off = s.actual()[r] - static_cast<double>(id.position);
    one_offset = one_offset && off == first;
    if (!drafts_off) continue;
    const auto took = OfRequest(*accepted, id.request);
    const int64_t asked = drafts.value_or(s.capture().Integer(*accepted->info, "drafts").value_or(0));
    drafts_off = took && off == static_cast<double>(asked) - *took;
  }
  if (drafts_off) {
    return ReportRule(s.capture(), s.report(), s.info(),
                      {fault_class::kSpec, "positions are ahead by the drafts that were not accepted"}, rows);
  }
  ReportRule(
      s.capture(), s.report(), s.info(),
      {fault_class::kRopePos, "positions given to the model are not those of its rows", first,
       one_offset ? "position used - position of the row" : "position used - position of the row, for the first"},
      rows);
}

void JudgeLengths(Subject& s) {
  std::vector<int64_t> rows;
  for (size_t r = 0; r < s.tensor()->rows.size() && r < s.actual().values.size(); ++r) {
    const RowId& id = s.tensor()->rows[r];
    if (id.real() && s.actual().values[r] != static_cast<double>(id.position + 1))
      rows.push_back(static_cast<int64_t>(r));
  }
  if (s.tensor()->rows.empty()) return;
  if (rows.empty()) return s.report().Right(s.info().id);
  const auto at = static_cast<size_t>(rows[0]);
  const double off = s.actual().values[at] - static_cast<double>(s.tensor()->rows[at].position + 1);
  const TensorPtr accepted = OfStep(s, "spec.accepted", s.info().event.step - 1);
  const auto took = accepted == nullptr ? std::nullopt : OfRequest(*accepted, s.tensor()->rows[at].request);
  const bool spec = took &&
                    off == static_cast<double>(s.capture().Integer(*accepted->info, "drafts").value_or(0)) - *took &&
                    off != 0;
  ReportRule(s.capture(), s.report(), s.info(),
             {spec ? fault_class::kSpec : fault_class::kMask, "lengths are not the position of the newest token plus 1",
              off, "length used - length of the request"},
             rows);
}

void JudgeAccepted(Subject& s) {
  const TensorPtr draft = s.Operand("spec.draft_tokens"), target = s.Operand("spec.target_tokens");
  if (draft == nullptr || target == nullptr) return;
  std::vector<int64_t> rows;
  for (size_t r = 0; r < s.tensor()->rows.size(); ++r) {
    const uint64_t request = s.tensor()->rows[r].request;
    for (size_t b = 0; b < draft->rows.size(); ++b) {
      if (draft->rows[b].request != request || static_cast<int64_t>(b) >= target->n_rows()) continue;
      int64_t lead = 0;
      const auto d = draft->row(static_cast<int64_t>(b)), t = target->row(static_cast<int64_t>(b));
      while (lead < static_cast<int64_t>(d.size()) && lead < static_cast<int64_t>(t.size()) &&
             d[static_cast<size_t>(lead)] >= 0 && d[static_cast<size_t>(lead)] == t[static_cast<size_t>(lead)])
        ++lead;
      if (s.actual().values[r] != static_cast<double>(lead)) rows.push_back(static_cast<int64_t>(r));
    }
  }
  if (rows.empty()) return s.report().Right(s.info().id);
  ReportRule(
      s.capture(), s.report(), s.info(),
      {fault_class::kSpec, "what was accepted is not the number of leading drafts that equal the model's choice"},
      rows);
}

void JudgeState(Subject& s) {
  const TensorPtr k = s.Operand(s.Sibling("attn.k")), v = s.Operand(s.Sibling("attn.v"));
  if (k == nullptr || v == nullptr) return Missing(s, s.Sibling(k == nullptr ? "attn.k" : "attn.v"));
  if (s.actual().rank() != 4 || k->shape.size() != 3 || v->shape.size() != 3) return;
  const TensorPtr accepted = OfStep(s, "spec.accepted", s.info().event.step);
  const int64_t size = s.tensor()->row_size();
  const std::vector<int64_t> shape(s.actual().shape.begin() + 1, s.actual().shape.end());
  for (int64_t b = 0; b < s.tensor()->n_rows(); ++b) {
    const RowId& id = s.tensor()->rows.empty() ? RowId{} : s.tensor()->rows[static_cast<size_t>(b)];
    if (!id.real()) continue;
    std::vector<int64_t> own;
    for (size_t r = 0; r < k->rows.size(); ++r) {
      if (k->rows[r].real() && k->rows[r].request == id.request) own.push_back(static_cast<int64_t>(r));
    }
    auto mine_k = oracle::TakeRows(ToArray(*k), own), mine_v = oracle::TakeRows(ToArray(*v), own);
    if (!mine_k.ok() || !mine_v.ok() || own.empty()) continue;
    // The state of the same request after an earlier step; a first step starts from zeros.
    Array state{{0}, {}};
    EventId last = kNoEvent;
    for (EventId e : s.capture().EventsOf(s.info().name)) {
      const auto info = s.capture().Info(e);
      if (info->event.step >= s.info().event.step || info->event.rank != s.info().event.rank) continue;
      auto t = s.capture().Load(e);
      if (!t.ok()) continue;
      for (size_t j = 0; j < (*t)->rows.size(); ++j) {
        if ((*t)->rows[j].request != id.request || (last != kNoEvent && !s.capture().Earlier(last, e))) continue;
        state = ToArray(shape, (*t)->row(static_cast<int64_t>(j)));
        last = e;
      }
    }
    if (last == kNoEvent && k->rows[static_cast<size_t>(own[0])].position != 0) {
      s.report().Missing(s.info().name + ": the state before the step was not recorded",
                         Capture::RecordHint(s.info().name + " of every step"));
      continue;
    }
    const auto took = accepted == nullptr ? std::nullopt : OfRequest(*accepted, id.request);
    const auto kept = std::min<int64_t>(took ? 1 + static_cast<int64_t>(*took) : static_cast<int64_t>(own.size()),
                                        static_cast<int64_t>(own.size()));
    const Array have = ToArray(shape, s.tensor()->row(b));
    const auto agrees = [&](int64_t rows, double slack) {
      auto y = oracle::UpdateState(state, *mine_k, *mine_v, rows);
      if (!y.ok()) return false;
      y->stores = static_cast<double>(rows) + 1;
      return Differ(have, *y, s.precision(), {}, slack).ok;
    };
    if (agrees(kept, 1)) {
      s.report().Right(s.info().id);
      continue;
    }
    (void)size;
    const int64_t row[] = {b};
    for (int64_t n = 0; n <= static_cast<int64_t>(own.size()); ++n) {
      if (n == kept || !agrees(n, 4)) continue;
      return ReportRule(
          s.capture(), s.report(), s.info(),
          {accepted != nullptr ? fault_class::kSpec : fault_class::kKernel,
           "the state holds " + std::to_string(n) + " rows of the step, " + std::to_string(kept) + " were kept",
           static_cast<double>(n - kept), "rejected tokens that remain in the state"},
          row);
    }
    return ReportRule(
        s.capture(), s.report(), s.info(),
        {fault_class::kKernel, "the state is not that of the step before and the rows of this one", kNone, "", 1}, row);
  }
}

void JudgeStateRead(Subject& s) {
  EventFilter filter;
  filter.rank = s.info().event.rank;
  const std::string name = s.Sibling("attn.state");
  for (int64_t b = 0; b < s.tensor()->n_rows(); ++b) {
    const RowId& id = s.tensor()->rows.empty() ? RowId{} : s.tensor()->rows[static_cast<size_t>(b)];
    if (!id.real()) continue;
    TensorPtr last;
    int64_t at = -1;
    for (EventId e : s.capture().Find(name, filter)) {
      auto t = s.capture().Load(e);
      if (!t.ok() || (*t)->info->event.step >= s.info().event.step) continue;
      for (size_t j = 0; j < (*t)->rows.size(); ++j) {
        if ((*t)->rows[j].request == id.request) {
          last = *t;
          at = static_cast<int64_t>(j);
        }
      }
    }
    if (last == nullptr) continue;
    const auto mine = s.tensor()->row(b), right = last->row(at);
    if (std::equal(mine.begin(), mine.end(), right.begin(), right.end())) {
      s.report().Right(s.info().id);
      continue;
    }
    const int64_t row[] = {b};
    // Another request's state, or an older one.
    for (EventId e : s.capture().Find(name, filter)) {
      auto t = s.capture().Load(e);
      if (!t.ok()) continue;
      for (size_t j = 0; j < (*t)->rows.size(); ++j) {
        const auto other = (*t)->row(static_cast<int64_t>(j));
        if (!std::equal(mine.begin(), mine.end(), other.begin(), other.end())) continue;
        return ReportRule(s.capture(), s.report(), s.info(),
                          {fault_class::kKvIdent, (*t)->rows[j].request == id.request
                                                      ? "the step starts from an older state of its request"
                                                      : "the step starts from the state of another request"},
                          row);
      }
    }
    return ReportRule(
        s.capture(), s.report(), s.info(),
        {fault_class::kKvIdent, "the step does not start from the state that the step before left", kNone, "", 1}, row);
  }
}

}  // namespace

void JudgeSpeculation(const Capture& capture, CheckReport* report) {
  const auto each = [&](std::string_view stem, const JudgeFunction& judge) {
    const std::string_view stems[] = {stem};
    JudgeStems(capture, report, stems, judge);
  };
  each("positions", JudgePositions);
  each("seq_lens", JudgeLengths);
  each("spec.accepted", JudgeAccepted);
  each("attn.state", JudgeState);
  each("attn.state_read", JudgeStateRead);
}

}  // namespace assay::check
