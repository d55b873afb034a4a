// Input rows of a run that starts in the middle of a model: the residual stream behind layer L, taken from payloads of
// another trace ("layers.L.out"), found again by request and position, never by order.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "stats/measure.h"
#include "trace/reader.h"

namespace assay {

template <class T>
class LayerInput {
 public:
  // kBadInput: no such trace, no payload of the site, a payload that is damaged, sharded or of another width.
  Status Open(const std::string& trace, int64_t layer, int64_t hidden);
  // Fills out [rows of runs, hidden]. kBadInput names the request and position that the trace lacks.
  Status Rows(std::span<const RowRun> runs, T* out) const;

 private:
  // For messages; the trace itself is closed again after Open.
  std::string site_, path_;
  int64_t hidden_ = 0;
  std::map<std::pair<uint64_t, int64_t>, std::vector<T>> rows_;  // (request, position)
};

extern template class LayerInput<float>;
extern template class LayerInput<double>;

}  // namespace assay
