// Attention that is nearly uniform or collapsed onto one key in every head: the entropy of the probabilities of sampled
// query rows. A symptom, not a cause.
#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "check/checks.h"
#include "check/helpers.h"
#include "check/op_attention.h"

namespace assay::check {
namespace {

constexpr int64_t kMinKeys = 16;      // fewer keys say nothing
constexpr size_t kMaxRows = 16;       // query rows a tensor
constexpr uint64_t kMinSamples = 32;  // rows times heads, over the site
// Of ln(keys): a head of a trained model is hardly ever this even, all of them never.
constexpr double kUniform = 0.99999;
constexpr double kCollapsed = 1e-6;

// Over all sampled rows of a site, by head too.
struct Tally {
  struct Count {
    uint64_t n = 0, uniform = 0, collapsed = 0;
  };
  Count all;
  std::map<int64_t, Count> heads;
  EventId first = kNoEvent;
  double sum = 0;

  void Add(EventId id, int64_t head, double entropy) {
    if (!std::isfinite(entropy)) return;
    if (first == kNoEvent) first = id;
    sum += entropy;
    for (Count* c : {&all, &heads[head]}) {
      ++c->n;
      c->uniform += entropy > kUniform ? 1 : 0;
      c->collapsed += entropy < kCollapsed ? 1 : 0;
    }
  }
  // ", 2 of 8 heads uniform": single heads may be by right, so that they are told and are no finding.
  std::string HeadsText() const {
    const auto of = [&](uint64_t Count::*what) {
      return std::count_if(heads.begin(), heads.end(), [&](const auto& h) { return h.second.*what == h.second.n; });
    };
    std::string text;
    if (const auto n = of(&Count::uniform); n > 0) text += ", " + std::to_string(n) + " uniform";
    if (const auto n = of(&Count::collapsed); n > 0) text += ", " + std::to_string(n) + " on one key";
    return text.empty() ? text : text + " of " + std::to_string(heads.size()) + " heads";
  }
};

// Entropy of softmax(scores) as a share of ln(n).
// Natural logarithms, divided by that of the number of keys: 1 is uniform, 0 one key.
double Entropy(std::vector<double> p) {
  const double top = *std::max_element(p.begin(), p.end());
  double sum = 0, out = 0;
  for (double& x : p) sum += x = std::exp(x - top);
  for (const double x : p) {
    if (x > 0) out -= x / sum * std::log(x / sum);
  }
  return out / std::log(static_cast<double>(p.size()));
}

// By the whole call as it was recorded: masks, windows, sinks and latents as they are. False: an operand is missing.
bool FromCall(const Capture& capture, const TensorPtr& result, Tally* tally, CheckReport* report) {
  const op::Subject out(capture, result, *report);
  auto call = op::GatherAttention(out);
  if (!call.ok()) return false;
  for (op::AttentionBatch& b : call->batches) {
    std::vector<int64_t> places;
    const size_t stride = std::max<size_t>(1, b.rows.size() / kMaxRows);
    // From the last row backwards: later queries see more keys.
    for (size_t i = b.rows.size(); i > 0; i -= std::min(i, stride))
      places.insert(places.begin(), static_cast<int64_t>(i) - 1);
    if (places.empty() || static_cast<int64_t>(b.key_positions.size()) < kMinKeys) continue;
    op::KeepQueries(&b, places);
    oracle::AttentionInput in = op::InputOf(b, *call);
    const std::vector<oracle::KeyRange> ranges(b.rows.size(), b.range);
    in.ranges = ranges;
    // A sink takes probability like one more key.
    const bool sink = !call->sinks.values.empty();
    in.sinks = sink ? &call->sinks : nullptr;
    const auto values = oracle::Attend(in, call->spec);
    if (!values.ok()) return false;
    for (int64_t i = 0; i < values->entropy.size(); ++i) {
      const double keys = values->keys_seen[i] + (sink ? 1 : 0);
      if (keys >= kMinKeys) tally->Add(result->info->id, i % call->heads, values->entropy[i] / std::log(keys));
    }
  }
  return true;
}

// Where the values were not recorded: from queries and keys alone.
// attn.q [T, H, d] against attn.k of the same request, scale and window as declared; other masks are not known here.
void FromQueries(const Capture& capture, const EventInfo& out, Tally* tally, CheckReport* report) {
  auto q = capture.LoadOperand(out, out.prefix + "attn.q");
  if (!q.ok()) return report->Missing(q.status().message(), Capture::RecordHint(out.prefix + "attn.q"));
  const Tensor& t = **q;
  const std::optional<double> scale = capture.Number(out, "softmax_scale");
  const int64_t window = capture.Integer(out, "window").value_or(0);
  const int64_t d = t.dim(-1), heads = t.row_size() / std::max<int64_t>(d, 1);
  if (d == 0) return;
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
        if (window > 0 && t.rows[r].position - keys->positions[k] >= window) continue;
        double dot = 0;
        const size_t at = k * static_cast<size_t>(keys->row_size()) + static_cast<size_t>(h / (heads / key_heads) * d);
        for (int64_t i = 0; i < d; ++i)
          dot += row[static_cast<size_t>(h * d + i)] * keys->values[at + static_cast<size_t>(i)];
        scores.push_back(dot * factor);
      }
      if (static_cast<int64_t>(scores.size()) < kMinKeys) continue;
      tally->Add(out.id, h, Entropy(std::move(scores)));
    }
  }
}

}  // namespace

void CheckEntropy(const Capture& capture, CheckReport* report) {
  std::vector<std::string> names = capture.NamesOfStem("attn.out");
  for (std::string& name : capture.NamesOfStem("attn.latent_out")) names.push_back(std::move(name));
  for (const std::string& name : names) {
    Tally tally;
    const std::vector<EventId> ids = RealEvents(capture, name);
    const size_t stride = std::max<size_t>(1, ids.size() / kMaxRows);
    for (size_t i = 0; i < ids.size(); i += stride) {
      const EventView view = capture.trace().event(ids[i]);
      if (!view.has_payload()) {
        report->Missing(name + " was recorded without its operands' values", Capture::RecordHint("attn.q and attn.k"));
        continue;
      }
      const auto info = capture.Info(ids[i]);
      // The output of a call on latents is that call's once more.
      if (name.ends_with("attn.out") && capture.Operand(*info, info->prefix + "attn.latent_out")) continue;
      const auto out = capture.Load(ids[i]);
      if (out.ok() && FromCall(capture, *out, &tally, report)) continue;
      FromQueries(capture, *info, &tally, report);
    }
    if (tally.all.n < kMinSamples) continue;
    report->Note(name + ": mean entropy " + NumberText(tally.sum / static_cast<double>(tally.all.n)) +
                 " of ln(keys) over " + std::to_string(tally.all.n) + " rows and heads" + tally.HeadsText());
    // A finding only when every head of every sampled row is so.
    if (tally.all.uniform < tally.all.n && tally.all.collapsed < tally.all.n) {
      report->Right(tally.first);
      continue;
    }
    Suspicion s = At(*capture.Info(tally.first), fault_class::kUnknown, 0);
    s.local = false;
    s.bad.measured = tally.sum / static_cast<double>(tally.all.n);
    s.bad.bound_basis =
        "entropy as a share of ln(keys), in all " + std::to_string(tally.all.n) + " sampled rows and heads";
    s.bad.confidence = 0.5;
    s.bad.evidence.push_back(tally.all.uniform == tally.all.n ? "attention is uniform: scores do not depend on the keys"
                                                              : "attention has collapsed onto one key in every head");
    report->Found(std::move(s));
  }
}

}  // namespace assay::check
