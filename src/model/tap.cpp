#include "model/tap.h"

#include <cstdio>

namespace assay {

// Layers have at most four digits and stems at most 47 characters, so names fit. At most five metadata pairs of the
// caller's own.
void Tap::Record(std::string_view stem, std::string_view axes, const TapView& view, const Where& where) {
  char name[96];
  const int length = where.layer >= 0
                         ? std::snprintf(name, sizeof name, "layers.%lld.%.*s", static_cast<long long>(where.layer),
                                         static_cast<int>(stem.size()), stem.data())
                         : std::snprintf(name, sizeof name, "%.*s", static_cast<int>(stem.size()), stem.data());
  const std::string_view site(name, static_cast<size_t>(length));
  // Before the recorder is asked: the clean twin has none.
  if (site == witness_site_) Witness(view);
  if (recorder_ == nullptr || !recorder_->armed() || !recorder_->wants(site, where.rank, step_)) return;

  std::array<std::pair<std::string_view, std::string_view>, 6> meta;
  size_t n_meta = 0;
  if (where.layer >= 0 && !path_.empty()) meta[n_meta++] = {"path", path_};
  for (const auto& entry : where.meta) {
    if (n_meta < meta.size()) meta[n_meta++] = entry;
  }
  Observation o;
  o.site = site;
  o.axes = axes;
  o.view.data = view.data;
  o.view.dtype = view.dtype;
  o.view.shape = {view.shape.data(), static_cast<size_t>(view.rank)};
  o.view.strides = {view.strides.data(), static_cast<size_t>(view.rank)};
  o.rank = where.rank;
  o.step = where.load ? -1 : step_;
  o.phase = where.load ? Phase::kLoad : phase_;
  o.compute_dtype = where.compute == DType::kInvalid ? compute_ : where.compute;
  if (!where.load) o.runs = where.runs.empty() ? runs_ : where.runs;
  o.shard = where.shard;
  o.meta = {meta.data(), n_meta};
  Status status = recorder_->Record(o);
  // What the machine refused (disk, budget) the recorder has counted; the run goes on.
  if (!status.ok() && status.code() != Code::kEnvironment && status_.ok()) status_ = std::move(status);
}

void Tap::Witness(const TapView& view) {
  // FNV-1a over the elements' bytes in row-major order. Every strided element is visited; the watched site is one only.
  const int64_t bytes = BitsOf(view.dtype) / 8;
  std::array<int64_t, 4> at{};
  int64_t count = 1;
  for (int i = 0; i < view.rank; ++i) count *= view.shape[static_cast<size_t>(i)];
  ++witness_events_;
  for (int64_t e = 0; e < count; ++e) {
    int64_t offset = 0;
    for (int i = 0; i < view.rank; ++i) offset += at[static_cast<size_t>(i)] * view.strides[static_cast<size_t>(i)];
    const auto* p = static_cast<const unsigned char*>(view.data) + offset * bytes;
    for (int64_t b = 0; b < bytes; ++b) witness_ = (witness_ ^ p[b]) * 1099511628211u;
    for (int i = view.rank; i-- > 0;) {
      if (++at[static_cast<size_t>(i)] < view.shape[static_cast<size_t>(i)]) break;
      at[static_cast<size_t>(i)] = 0;
    }
  }
}

}  // namespace assay
