#include "check/stuck_heads.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <string_view>
#include <utility>

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

// Values of a request under one of the names that a call may have read them by, [rows, value heads, columns]. Of a
// head's columns the value is the last ones, of latents the first ones.
struct Values {
  RequestRows rows;
  int64_t heads = 0;
};

// As computed, as read back behind the write, as gathered: a call takes the rows of earlier steps from a cache that
// rounds, and those of its own step from either. What was not recorded, or has other heads, is left out.
std::vector<Values> ValuesOf(const Capture& capture, const EventInfo& out, uint64_t request, int64_t width) {
  const bool latent = out.site.stem == "attn.latent_out";
  std::vector<Values> all;
  for (const char* stem :
       {latent ? "attn.kv_c_normed" : "attn.v", latent ? "attn.kv_read" : "attn.v_read", "attn.kv_write"}) {
    auto rows = capture.RowsOf(out.prefix + stem, request, out.id, out.event.rank);
    if (!rows.ok() || rows->positions.empty()) continue;
    const int64_t size = rows->row_size();
    int64_t heads = 1;  // of latents
    if (!latent && std::string_view(stem) != "attn.kv_write") {
      heads = size / width;
    } else if (!latent) {  // keys stand before the values; engines record heads on an axis of their own or flat
      heads = rows->row_shape.size() > 1 && rows->row_shape[0] > 1 ? rows->row_shape[0]
              : all.empty()                                        ? 0
                                                                   : all[0].heads;
    }
    if (heads > 0 && size % heads == 0 && size / heads >= width) all.push_back({std::move(*rows), heads});
  }
  return all;
}

// Relative, by norms. A cache's codes of 4 bits are a quarter off at most, and a share of another key may not show in
// the output's dtype; a row that is no value is about its own size away from all of them.
constexpr double kNear = 0.25;

// Every row that the request's head may have attended to is known, up to its position `last`, and none of them is
// `row`. Rows that another request or a step without recording left in the cache are not known.
bool IsNoValue(const Capture& capture, const EventInfo& out, uint64_t request, int64_t last,
               std::span<const double> row, int64_t head, int64_t heads) {
  const bool latent = out.site.stem == "attn.latent_out";
  const auto width = static_cast<int64_t>(row.size());
  double size = 0;
  for (double v : row) size += v * v;
  std::set<int64_t> known;
  for (const Values& values : ValuesOf(capture, out, request, width)) {
    if (heads % values.heads != 0) continue;
    const int64_t columns = values.rows.row_size() / values.heads;
    const int64_t first = head / (heads / values.heads) * columns + (latent ? 0 : columns - width);
    for (int64_t position : values.rows.positions) {
      const std::span<const double> value =
          values.rows.at(position).subspan(static_cast<size_t>(first), static_cast<size_t>(width));
      double off = 0;
      for (size_t i = 0; i < row.size(); ++i) off += (value[i] - row[i]) * (value[i] - row[i]);
      if (!(off > kNear * kNear * size)) return false;
      known.insert(position);
    }
  }
  int64_t next = 0;
  for (auto at = known.lower_bound(0); at != known.end() && *at == next; ++at) ++next;
  return next > last;
}

}  // namespace

StuckHeads FindStuckHeads(const Capture& capture, std::span<const EventId> events) {
  StuckHeads stuck;
  std::vector<HeadRows> heads;
  std::map<uint64_t, int64_t> requests;  // with the last position looked at
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
      int64_t& until = requests[t.rows[r].request];
      until = std::max(until, t.rows[r].position);
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
    } else if (!all && (OneValue(row) || std::all_of(requests.begin(), requests.end(), [&](const auto& request) {
                          return IsNoValue(capture, *last, request.first, request.second, row, number,
                                           static_cast<int64_t>(heads.size()));
                        }))) {
      stuck.constant.push_back(number);
    }
  }
  return stuck;
}

}  // namespace assay::check
