#include "check/stuck_heads.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>

namespace assay::check {
namespace {

constexpr int64_t kMostRows = 64;
constexpr int64_t kLeastRows = 4;  // fewer may be equal by chance in a coarse dtype
constexpr size_t kMostEvents = 64;

// The rows looked at of one head, in the order of recording.
struct HeadRows {
  std::vector<double> first;  // of the head, in the first row
  bool same = true;
};

bool OneValue(const std::vector<double>& row) {
  return row.size() > 1 && std::all_of(row.begin(), row.end(), [&](double v) { return v == row[0]; });
}

// The rows that the values of a request hold for this output head are recorded, and none of them is `row`. Within 1 %:
// a share of another key that does not show in the output's dtype.
bool IsNoValue(const Capture& capture, const EventInfo& out, uint64_t request, std::span<const double> row,
               int64_t head, int64_t heads) {
  const bool latent = out.site.stem == "attn.latent_out";
  const auto values =
      capture.RowsOf(out.prefix + (latent ? "attn.kv_c_normed" : "attn.v"), request, out.id, out.event.rank);
  const auto width = static_cast<int64_t>(row.size());
  if (!values.ok() || values->positions.empty() || values->row_size() % width != 0) return false;
  const int64_t value_heads = values->row_size() / width;
  if (heads % value_heads != 0) return false;
  const int64_t first = head / (heads / value_heads) * width;
  double size = 0;
  for (double v : row) size += v * v;
  for (int64_t position : values->positions) {
    const std::span<const double> value =
        values->at(position).subspan(static_cast<size_t>(first), static_cast<size_t>(width));
    double off = 0;
    for (size_t i = 0; i < row.size(); ++i) off += (value[i] - row[i]) * (value[i] - row[i]);
    if (off <= 1e-4 * size) return false;
  }
  return true;
}

}  // namespace

StuckHeads FindStuckHeads(const Capture& capture, std::span<const EventId> events) {
  StuckHeads stuck;
  std::vector<HeadRows> heads;
  std::set<uint64_t> requests;
  std::shared_ptr<const EventInfo> last;
  const size_t stride = std::max<size_t>(1, events.size() / kMostEvents);
  for (size_t i = 0; i < events.size() && stuck.n_rows < kMostRows; i += stride) {
    const auto tensor = capture.Load(events[i]);
    if (!tensor.ok()) continue;
    const Tensor& t = **tensor;
    if (t.shape.size() != 3 || t.shape[1] < 2 || static_cast<int64_t>(t.rows.size()) != t.n_rows()) continue;
    const auto n_heads = static_cast<size_t>(t.shape[1]), width = static_cast<size_t>(t.shape[2]);
    if (heads.empty()) heads.resize(n_heads);
    if (heads.size() != n_heads || width == 0) return {};
    last = t.info;
    for (size_t r = 0; r < t.rows.size() && stuck.n_rows < kMostRows; ++r) {
      if (!t.rows[r].real() || t.rows[r].position < 1) continue;
      requests.insert(t.rows[r].request);
      ++stuck.n_rows;
      for (size_t h = 0; h < n_heads; ++h) {
        const std::span<const double> row = t.row(static_cast<int64_t>(r)).subspan(h * width, width);
        if (heads[h].first.empty()) heads[h].first.assign(row.begin(), row.end());
        heads[h].same =
            heads[h].same && std::equal(row.begin(), row.end(), heads[h].first.begin(), heads[h].first.end());
      }
    }
  }
  if (stuck.n_rows < kLeastRows) return {};
  const bool all = std::all_of(heads.begin(), heads.end(), [](const HeadRows& h) { return h.same; });
  for (size_t h = 0; h < heads.size(); ++h) {
    const std::vector<double>& row = heads[h].first;
    if (!heads[h].same) continue;
    const auto number = static_cast<int32_t>(h);
    if (std::all_of(row.begin(), row.end(), [](double v) { return v == 0; })) {
      stuck.zero.push_back(number);
    } else if (!all && (OneValue(row) || std::all_of(requests.begin(), requests.end(), [&](uint64_t request) {
                          return IsNoValue(capture, *last, request, row, number, static_cast<int64_t>(heads.size()));
                        }))) {
      stuck.constant.push_back(number);
    }
  }
  return stuck;
}

}  // namespace assay::check
