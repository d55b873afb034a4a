// Attention that is nearly uniform or collapsed onto one key in every head: the entropy of the probabilities of sampled
// query rows. A symptom, not a cause.
#include <algorithm>
#include <cmath>

#include "check/checks.h"
#include "check/helpers.h"

namespace assay::check {
namespace {

constexpr int64_t kMinKeys = 16;      // fewer keys say nothing
constexpr size_t kMaxRows = 16;       // query rows a tensor
constexpr uint64_t kMinSamples = 32;  // rows times heads, over the site
// Of ln(keys): a head of a trained model is hardly ever this even, all of them never.
constexpr double kUniform = 0.99999;
constexpr double kCollapsed = 1e-6;

struct Tally {
  uint64_t n = 0, uniform = 0, collapsed = 0;
  EventId first = kNoEvent;
  double sum = 0;

  void Add(EventId id, double entropy) {
    if (first == kNoEvent) first = id;
    ++n;
    sum += entropy;
    uniform += entropy > kUniform ? 1 : 0;
    collapsed += entropy < kCollapsed ? 1 : 0;
  }
};

// Entropy of softmax(scores) as a share of ln(n).
double Entropy(std::vector<double> p) {
  const double top = *std::max_element(p.begin(), p.end());
  double sum = 0, out = 0;
  for (double& x : p) sum += x = std::exp(x - top);
  for (const double x : p) {
    if (x > 0) out -= x / sum * std::log(x / sum);
  }
  return out / std::log(static_cast<double>(p.size()));
}

void FromQueries(const Capture& capture, const EventInfo& out, Tally* tally, CheckReport* report) {
  auto q = capture.LoadOperand(out, out.prefix + "attn.q");
  if (!q.ok()) return report->Missing(q.status().message(), Capture::RecordHint(out.prefix + "attn.q"));
  const Tensor& t = **q;
  const std::optional<double> scale = capture.Number(out, "softmax_scale");
  const int64_t d = t.dim(-1), heads = t.row_size() / std::max<int64_t>(d, 1);
  const size_t stride = std::max<size_t>(1, t.rows.size() / kMaxRows);
  for (size_t r = 0; r < t.rows.size(); r += stride) {
    if (!t.rows[r].real() || t.rows[r].position + 1 < kMinKeys) continue;
    auto keys = capture.RowsOf(out.prefix + "attn.k", t.rows[r].request, out.id, out.event.rank);
    if (!keys.ok()) return report->Missing(keys.status().message(), Capture::RecordHint(out.prefix + "attn.k"));
    const int64_t key_heads = keys->row_size() / std::max<int64_t>(d, 1);
    if (key_heads == 0 || heads % key_heads != 0 || keys->row_size() % d != 0) return;
    const double factor = scale.value_or(1 / std::sqrt(static_cast<double>(d)));
    const auto row = t.row(static_cast<int64_t>(r));
    for (int64_t h = 0; h < heads; ++h) {
      std::vector<double> scores;
      for (size_t k = 0; k < keys->positions.size() && keys->positions[k] <= t.rows[r].position; ++k) {
        double dot = 0;
        const size_t at = k * static_cast<size_t>(keys->row_size()) + static_cast<size_t>(h / (heads / key_heads) * d);
        for (int64_t i = 0; i < d; ++i)
          dot += row[static_cast<size_t>(h * d + i)] * keys->values[at + static_cast<size_t>(i)];
        scores.push_back(dot * factor);
      }
      if (static_cast<int64_t>(scores.size()) < kMinKeys) continue;
      const double entropy = Entropy(std::move(scores));
      if (std::isfinite(entropy)) tally->Add(out.id, entropy);
    }
  }
}

}  // namespace

void CheckEntropy(const Capture& capture, CheckReport* report) {
  for (const std::string& name : capture.NamesOfStem("attn.out")) {
    Tally tally;
    const std::vector<EventId> ids = RealEvents(capture, name);
    const size_t stride = std::max<size_t>(1, ids.size() / kMaxRows);
    for (size_t i = 0; i < ids.size(); i += stride) {
      const EventView view = capture.trace().event(ids[i]);
      if (!view.has_payload()) {
        report->Missing(name + " was recorded without its operands' values", Capture::RecordHint("attn.q and attn.k"));
        continue;
      }
      FromQueries(capture, *capture.Info(ids[i]), &tally, report);
    }
    if (tally.n < kMinSamples) continue;
    report->Note(name + ": mean entropy " + NumberText(tally.sum / static_cast<double>(tally.n)) +
                 " of ln(keys) over " + std::to_string(tally.n) + " rows and heads");
    if (tally.uniform < tally.n && tally.collapsed < tally.n) {
      report->Right(tally.first);
      continue;
    }
    Suspicion s = At(*capture.Info(tally.first), fault_class::kUnknown, 0);
    s.local = false;
    s.bad.measured = tally.sum / static_cast<double>(tally.n);
    s.bad.bound_basis = "entropy as a share of ln(keys), in all " + std::to_string(tally.n) + " sampled rows and heads";
    s.bad.confidence = 0.5;
    s.bad.evidence.push_back(tally.uniform == tally.n ? "attention is uniform: scores do not depend on the keys"
                                                      : "attention has collapsed onto one key in every head");
    report->Found(std::move(s));
  }
}

}  // namespace assay::check
