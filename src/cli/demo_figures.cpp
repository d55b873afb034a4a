#include "cli/demo_figures.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <optional>

#include "sites/site_table.h"
#include "stats/measure.h"

namespace assay::cli {
namespace {

// All events of one site in one step: the ranks' shards and the requests of the batch taken together.
std::optional<Figure> SumUp(const Trace& trace, const std::string& name, const std::string& site, int64_t step) {
  std::optional<Figure> figure;
  double sum_sq = 0;
  for (uint64_t i = 0; i < trace.event_count(); ++i) {
    const EventView view = trace.event(i);
    if (view.step() != step || trace.site_names()[view.global_site()] != site) continue;
    const Event event = view.Decode();
    // A replicated tensor is recorded by every rank; one copy is the tensor.
    if (event.shard.count <= 1 && event.rank != 0) continue;
    if (!figure) {
      figure = Figure{name, event.shape, 0, 0, ""};
      if (event.shard.count > 1 && event.head_axis >= 0) figure->shape[event.head_axis] *= event.shard.count;
    }
    for (const Segment& segment : event.segments) {
      if (segment.padding) continue;
      sum_sq += segment.stats.sum_sq;
      figure->nonfinite += segment.stats.nonfinite();
    }
  }
  if (figure) figure->norm = std::sqrt(sum_sq);
  return figure;
}

// k_pe and the latent side by side, or the latent alone.
Figure Latent(const std::string& name, const Figure& latent, const Figure* k_pe) {
  Figure figure{name, {latent.shape[0], 1, latent.shape.back()}, latent.norm, latent.nonfinite, "latent"};
  if (k_pe != nullptr) {
    figure.shape.back() += k_pe->shape.back();
    figure.norm = std::hypot(latent.norm, k_pe->norm);
    figure.nonfinite += k_pe->nonfinite;
  }
  return figure;
}

// From the checkpoint, as the patch read it from the module.
Result<Figure> KvBProj(const Checkpoint& checkpoint, int32_t layer) {
  const std::string stem = fmt::format("model.layers.{}.self_attn.kv_b_proj.weight", layer);
  const CheckpointTensor* weight = checkpoint.find(stem);
  if (weight == nullptr) return Status::BadInput(fmt::format("{}: no tensor {}", checkpoint.path(), stem));
  // Row-major, contiguous; checked by the reader.
  std::vector<int64_t> strides(weight->shape.size(), 1);
  for (size_t i = strides.size(); i-- > 1;) strides[i - 1] = strides[i] * weight->shape[i];
  std::vector<Segment> segments;
  ASSAY_RETURN_IF_ERROR(Measure({weight->data, weight->dtype, weight->shape, strides}, {}, {}, &segments));
  Figure figure{"kv_b_proj", weight->shape, 0, 0, ""};
  double sum_sq = 0;
  for (const Segment& segment : segments) {
    sum_sq += segment.stats.sum_sq;
    figure.nonfinite += segment.stats.nonfinite();
  }
  figure.norm = std::sqrt(sum_sq);
  const bool scaled = checkpoint.find(stem + "_scale") != nullptr || checkpoint.find(stem + "_scale_inv") != nullptr;
  figure.note = fmt::format("{}, {}", NameOf(weight->dtype), scaled ? "quantised" : "not quantised");
  return figure;
}

// Whether a prefill step found earlier positions in the cache (chunked prefill).
bool HasContext(const Trace& trace, const std::string& site, int64_t step) {
  for (uint64_t i = 0; i < trace.event_count(); ++i) {
    const EventView view = trace.event(i);
    if (view.step() != step || view.phase() == Phase::kDecode) continue;
    if (trace.site_names()[view.global_site()] != site) continue;
    for (int32_t s = 0; s < view.n_segments(); ++s) {
      // Segments are cut at multiples of 64: only the first one of a request tells where its rows begin.
      const bool first = s == 0 || view.segment(s).request != view.segment(s - 1).request;
      if (first && view.segment(s).first_position > 0) return true;
    }
  }
  return false;
}

// Of the step's first event.
std::string PhaseOf(const Trace& trace, int64_t step) {
  for (uint64_t i = 0; i < trace.event_count(); ++i) {
    if (trace.event(i).step() == step) return std::string(NameOf(trace.event(i).phase()));
  }
  return "unknown";
}

}  // namespace

std::string Figure::text() const {
  if (shape.empty()) return note;
  std::string text = fmt::format("[{}]  norm {:.4g}", fmt::join(shape, ", "), norm);
  if (nonfinite > 0) text += fmt::format("  {} NON-FINITE", nonfinite);
  if (!note.empty()) text += "  " + note;
  return text;
}

bool HandPatch::healthy() const {
  for (const Figure& figure : figures) {
    if (!figure.shape.empty() && (figure.nonfinite > 0 || !(figure.norm > 0))) return false;
  }
  return true;
}

Result<HandPatch> ReadHandPatch(const Trace& trace, const Checkpoint& checkpoint, int32_t layer, int64_t step) {
  const auto read = [&](const char* name, const char* stem) {
    return SumUp(trace, name, FormatSiteName(layer, stem), step);
  };
  HandPatch patch;
  patch.layer = layer;
  patch.step = step;
  patch.phase = PhaseOf(trace, step);
  const auto q = read("q", "attn.q"), latent = read("kv_c_normed", "attn.kv_c_normed");
  const auto k_pe = read("k_pe", "attn.k_pe");
  if (!q || !latent || !k_pe) {
    return Status::BadInput(
        fmt::format("{}: layer {} of step {} lacks attn.q, attn.kv_c_normed or attn.k_pe", trace.path(), layer, step));
  }
  const auto k = read("k", "attn.k"), v = read("v", "attn.v");
  patch.figures = {*q, k ? *k : Latent("k", *latent, &*k_pe), v ? *v : Latent("v", *latent, nullptr), *latent};
  ASSAY_ASSIGN_OR_RETURN(Figure kv_b, KvBProj(checkpoint, layer));
  patch.figures.push_back(std::move(kv_b));
  const bool context = HasContext(trace, FormatSiteName(layer, "attn.q"), step);
  patch.figures.push_back({"has_context", {}, 0, 0, context ? "True" : "False"});
  return patch;
}

}  // namespace assay::cli
