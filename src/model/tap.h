// The engine's side of a probe: turns a buffer of the running step into an Observation with its rows' identity.
//
// Off (no recorder, or a disarmed one) a tap is one branch. The tap never copies a tensor and never changes one; it
// sees strided views of the engine's own buffers. It also keeps the witness of a planted fault: a hash of everything
// observed at the fault's first wrong site, by which a run with the fault is told from a clean one, bit by bit.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "probe/recorder.h"
#include "stats/measure.h"
#include "trace/event.h"

namespace assay {

// A tensor of rank <= 4, borrowed for the call. Strides in elements.
struct TapView {
  const void* data = nullptr;
  DType dtype = DType::kInvalid;
  int rank = 0;
  std::array<int64_t, 4> shape{}, strides{};
};

inline DType DTypeOf(const float*) { return DType::kF32; }
inline DType DTypeOf(const double*) { return DType::kF64; }
inline DType DTypeOf(const int64_t*) { return DType::kI64; }

// shape and strides have one entry an axis, at most four.
template <class T>
TapView StridedView(const T* data, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> strides) {
  TapView view{data, DTypeOf(data), static_cast<int>(shape.size()), {}, {}};
  std::copy(shape.begin(), shape.end(), view.shape.begin());
  std::copy(strides.begin(), strides.end(), view.strides.begin());
  return view;
}

// Row-major without gaps.
template <class T>
TapView DenseView(const T* data, std::initializer_list<int64_t> shape) {
  TapView view = StridedView(data, shape, shape);
  int64_t stride = 1;
  for (int i = view.rank; i-- > 0;) {
    view.strides[static_cast<size_t>(i)] = stride;
    stride *= view.shape[static_cast<size_t>(i)];
  }
  return view;
}

// Pairs put on the event; borrowed for the call.
using TapMeta = std::span<const std::pair<std::string_view, std::string_view>>;

class Tap {
 public:
  // recorder may be null. compute: the run's arithmetic, put on every event that does not say otherwise. path_meta:
  // "materialised", "absorbed" or "" and is put on every event of a layer.
  Tap(Recorder* recorder, DType compute, std::string_view path_meta)
      : recorder_(recorder), compute_(compute), path_(path_meta) {}

  // Whether anybody looks: callers do not build views otherwise.
  bool on() const { return !witness_site_.empty() || (recorder_ != nullptr && recorder_->armed()); }

  // Everything recorded until the next call belongs to this step; runs say whose rows they are.
  void BeginStep(int64_t step, Phase phase, std::span<const RowRun> runs) {
    step_ = step;
    phase_ = phase;
    runs_ = runs;
  }

  // What an observation has beside its name and values.
  struct Where {
    int64_t layer = -1;
    int rank = 0;
    Shard shard = {};
    std::span<const RowRun> runs = {};  // empty: the step's
    DType compute = DType::kInvalid;    // kInvalid: the run's
    TapMeta meta = {};
    bool load = false;  // a weight: no step, phase "load", no token rows
  };
  // stem: canonical name without the layer. An observation that does not fit together is
  // an error (status()); one that the machine refused is counted by the recorder.
  void Record(std::string_view stem, std::string_view axes, const TapView& view, const Where& where);

  // The first error since the start; the engine looks once a step.
  const Status& status() const { return status_; }

  // The witness: site, or empty for none.
  void WatchSite(std::string site) { witness_site_ = std::move(site); }
  uint64_t witness() const { return witness_; }
  uint64_t witness_events() const { return witness_events_; }

 private:
  // Folds the elements' bits into witness_, whatever their strides.
  void Witness(const TapView& view);

  Recorder* recorder_;
  DType compute_;
  std::string path_;
  int64_t step_ = -1;
  Phase phase_ = Phase::kUnknown;
  std::span<const RowRun> runs_;
  Status status_;
  std::string witness_site_;
  // FNV-1a's offset basis.
  uint64_t witness_ = 14695981039346656037u;
  uint64_t witness_events_ = 0;
};

}  // namespace assay
