#include "compare/joint_index.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <unordered_map>

#include "base/parallel_for.h"
#include "compare/site_graph.h"
#include "sites/beyond_table.h"

namespace assay {
namespace {

// No number: event counts below it are checked first.
constexpr uint32_t kNone = ~uint32_t{0};
// Segments are cut at multiples of 64 rows by default; more rows without a row grid than this is a forged size.
constexpr int64_t kMaxRowsWithoutGrid = 1 << 16;
constexpr uint64_t kMaxRows = uint64_t{1} << 31;

// Counted for the notes.
struct LeftOut {
  uint64_t warmup = 0, padding = 0, empty = 0, out_of_range = 0;
};

// Where a run puts its blocks is nobody else's.
// The flat memory of a view was recorded beside it, for checks of strides: it holds what others put there as well.
bool IsOwnAffair(std::string_view name) {
  return name == "slot_mapping" || name == "block_table" || name.ends_with(".storage");
}
bool IsStep(Phase phase) { return phase == Phase::kPrefill || phase == Phase::kDecode || phase == Phase::kMixed; }
bool IsParameter(std::string_view name) {
  return name.find(".weight") != std::string_view::npos || name.ends_with(".bias") || name.ends_with(".sinks") ||
         name.ends_with(".alibi_slopes");
}
bool IsRealPhase(Phase phase) { return phase != Phase::kWarmup && phase != Phase::kDummy && phase != Phase::kCapture; }

// Sorted so, the pieces of a site lie together, and in them those of a request, ascending.
auto OrderOf(const Piece& p) { return std::tie(p.site, p.request, p.position, p.event, p.segment); }

// What a step is given and no layer makes: all sites read it.
bool IsStepInput(std::string_view name) { return name == "positions" || name == "seq_lens" || name == "rope.cos_sin"; }

int64_t OrderBehind(const SiteName& site, std::string_view canonical) {
  SiteName before = site;
  for (const SiteDef& def : AllSites()) {
    if (def.name == canonical) before.def = &def;
  }
  return ExecutionOrder(before) + 1;
}

// Tensors without token rows are what others are computed from (weights, scales): before their layer.
// Reads of a cache come right behind its writes, and what the experts do behind their choice, whatever order the engine
// recorded them in.
int64_t CausalOrder(const JointSite& site) {
  if (site.parsed.layer < 0 && IsStepInput(site.parsed.stem)) return -1;
  if (const BeyondSite* beyond = FindBeyond(site.parsed.stem); beyond != nullptr && !beyond->behind.empty()) {
    return OrderBehind(site.parsed, beyond->behind);
  }
  if (site.parsed.def == nullptr && !site.has_rows) {
    SiteName first = site.parsed;
    first.partial = true;
    if (site.parsed.layer < 0) return -1;
    for (const SiteDef& def : AllSites()) {
      if (!def.per_layer) continue;
      first.def = &def;
      break;
    }
    return ExecutionOrder(first) - 1;
  }
  if (site.parsed.layer >= 0 && IsCacheRead(site.parsed.stem)) return OrderBehind(site.parsed, "attn.kv_write");
  return ExecutionOrder(site.parsed);
}

// Both sides are read at once, each by its own thread; only numbering is common.
// Numbers stand for names, requests and rows from here on: pieces are sorted and matched by them alone.
class Builder {
 public:
  Builder(const Trace& a, const Trace& b, int threads) : threads_(threads) {
    index_.trace[kA] = &a;
    index_.trace[kB] = &b;
  }

  // The order matters: sites and announced requests are numbered before both scans, what only a scan can see after
  // them.
  Result<JointIndex> Run() {
    NumberSites();
    NumberRequests();
    ForBoth([this](int side) { Scan(side); });
    for (int side : {kA, kB}) {
      if (!failure_[side].ok()) return failure_[side];
    }
    AddUnknownRequests();
    RenumberSites();
    ForBoth([this](int side) { Sort(side); });
    ASSAY_RETURN_IF_ERROR(NumberRows());
    AddNotes();
    return std::move(index_);
  }

 private:
  // f must not touch the other side's state.
  template <class F>
  void ForBoth(F f) {
    ParallelFor(2, threads_, [&](int64_t side) { f(static_cast<int>(side)); });
  }

  // Common numbers by name, in order of first sight; RenumberSites puts them in causal order.
  void NumberSites() {
    std::unordered_map<std::string_view, uint32_t> numbers;
    for (int side : {kA, kB}) {
      for (const std::string& name : index_.trace[side]->site_names()) {
        auto [it, is_new] = numbers.try_emplace(name, static_cast<uint32_t>(index_.sites.size()));
        if (is_new) {
          JointSite site;
          site.name = name;
          site.parsed = ParseSiteName(name);
          index_.sites.push_back(std::move(site));
        }
        joint_site_[side].push_back(it->second);
      }
    }
  }

  // Announced requests alone; those that only events name are numbered after the scan.
  void NumberRequests() {
    for (int side : {kA, kB}) {
      for (const TraceProcess& process : index_.trace[side]->processes()) {
        for (const RequestInfo& info : process.requests) {
          JointRequest& request = index_.requests[SlotOf(info.key)];
          request.prompt_tokens = std::max(request.prompt_tokens, info.prompt_tokens);
        }
      }
    }
    known_ = slots_;
  }

  // Of a request, announced or not; makes a new slot when the key is new. Not for threads.
  uint32_t SlotOf(uint64_t key) {
    auto [it, is_new] = slots_.try_emplace(key, static_cast<uint32_t>(index_.requests.size()));
    if (is_new) {
      JointRequest request;
      request.key = key;
      index_.requests.push_back(request);
    }
    return it->second;
  }

  // Fills pieces[side] in order of recording. Requests that no record announced, and rows without one, get numbers
  // of their own that AddUnknownRequests makes common: bit 31 set, local to the side.
  void Scan(int side) {
    const Trace& trace = *index_.trace[side];
    const uint64_t n = trace.event_count();
    // Event numbers are kept in 32 bits.
    if (n >= kNone) {
      failure_[side] = Status::BadInput(trace.path() + ": more than 2^32 events; compare it in parts");
      return;
    }
    std::vector<Piece>& pieces = index_.pieces[side];
    pieces.reserve(n);
    SideState& state = side_[side];
    state.first_sequence.assign(index_.sites.size(), ~uint64_t{0});
    state.has_rows.assign(index_.sites.size(), 0);
    state.in_step.assign(index_.sites.size(), 0);
    state.recorded.assign(index_.sites.size(), 0);
    for (uint64_t i = 0; i < n; ++i) {
      const EventView event = trace.event(i);
      const uint32_t site = joint_site_[side][event.global_site()];
      state.recorded[site] = 1;
      if (!IsRealPhase(event.phase())) {
        ++state.left_out.warmup;
        continue;
      }
      state.in_step[site] |= IsStep(event.phase());
      if (!event.meta("audit").empty()) continue;  // looks at a buffer with a pattern in it
      if (IsOwnAffair(index_.sites[site].name)) continue;
      state.first_sequence[site] = std::min(state.first_sequence[site], event.sequence());
      const int32_t n_segments = event.n_segments();
      if (n_segments == 0) ++state.left_out.empty;
      uint32_t anonymous = kNone;  // number of this recording, found when it is needed
      for (int32_t s = 0; s < n_segments; ++s) {
        const SegmentSummary segment = event.segment(s);
        if (segment.padding) {
          ++state.left_out.padding;
          continue;
        }
        // Positions are kept in 32 bits; the reader has refused sums beyond int64.
        const int64_t last = segment.first_position + std::max<int64_t>(segment.n_rows, 1) - 1;
        if (segment.n_rows < 0 || segment.first_position < std::numeric_limits<int32_t>::min() ||
            last > std::numeric_limits<int32_t>::max() ||
            (segment.n_row_cells == 0 && segment.n_rows > kMaxRowsWithoutGrid)) {
          ++state.left_out.out_of_range;
          continue;
        }
        uint32_t request = 0;
        if (segment.request != 0) {
          request = KnownOrLocal(side, segment.request);
        } else {
          if (anonymous == kNone) {
            anonymous = state.recordings[(uint64_t{site} << 32) | static_cast<uint32_t>(event.rank())]++;
            state.max_anonymous = std::max(state.max_anonymous, anonymous + 1);
          }
          request = kAnonymous | anonymous;
        }
        state.has_rows[site] |= segment.n_rows > 0;
        // n_rows fits 32 bits: both ends of its positions do.
        pieces.push_back({site, request, static_cast<int32_t>(segment.first_position),
                          static_cast<uint32_t>(segment.n_rows), static_cast<uint32_t>(i), static_cast<uint32_t>(s)});
      }
    }
  }

  // Slots below kLocal are common; kLocal | n is the side's n-th request that no request record announced.
  uint32_t KnownOrLocal(int side, uint64_t key) {
    SideState& state = side_[side];
    // Segments of one request lie together, so most look-ups end here. Key 0 never comes: it means no request.
    if (key == state.last_key) return state.last_slot;
    uint32_t slot = 0;
    if (auto it = known_.find(key); it != known_.end()) {
      slot = it->second;
    } else {
      auto [local, is_new] = state.local.try_emplace(key, static_cast<uint32_t>(state.local_keys.size()));
      if (is_new) state.local_keys.push_back(key);
      slot = kLocal | local->second;
    }
    state.last_key = key;
    state.last_slot = slot;
    return slot;
  }

  // The n-th event of a site and rank without requests meets the n-th of the other side.
  void AddUnknownRequests() {
    const uint32_t anonymous = std::max(side_[kA].max_anonymous, side_[kB].max_anonymous);
    std::vector<uint32_t> common[2];
    for (int side : {kA, kB}) {
      for (uint64_t key : side_[side].local_keys) common[side].push_back(SlotOf(key));
    }
    const auto base = static_cast<uint32_t>(index_.requests.size());
    for (uint32_t i = 0; i < anonymous; ++i) {
      JointRequest request;
      request.ordinal = i;
      index_.requests.push_back(request);
    }
    ForBoth([&](int side) {
      for (Piece& piece : index_.pieces[side]) {
        if (piece.request & kAnonymous) {
          piece.request = base + (piece.request & ~kAnonymous);
        } else if (piece.request & kLocal) {
          piece.request = common[side][piece.request & ~kLocal];
        }
      }
    });
  }

  // Ties of causal order (foreign sites) are broken by order of recording.
  void RenumberSites() {
    const auto n = static_cast<uint32_t>(index_.sites.size());
    for (uint32_t i = 0; i < n; ++i) {
      JointSite& site = index_.sites[i];
      for (int side : {kA, kB}) {
        site.recorded[side] = side_[side].recorded[i] != 0;
        site.has_rows |= side_[side].has_rows[i] != 0;
        site.per_step |= side_[side].in_step[i] != 0 && !IsParameter(site.name);
      }
      // Order of recording of the first trace; of the second for what the first lacks.
      site.first_sequence = side_[site.recorded[kA] ? kA : kB].first_sequence[i];
    }
    std::vector<uint32_t> order(n), place(n);
    for (uint32_t i = 0; i < n; ++i) order[i] = i;
    std::vector<int64_t> causal(n);
    for (uint32_t i = 0; i < n; ++i) causal[i] = CausalOrder(index_.sites[i]);
    std::sort(order.begin(), order.end(), [&](uint32_t x, uint32_t y) {
      const JointSite &a = index_.sites[x], &b = index_.sites[y];
      return std::tie(causal[x], a.first_sequence, a.name) < std::tie(causal[y], b.first_sequence, b.name);
    });
    std::vector<JointSite> sorted;
    sorted.reserve(n);
    for (uint32_t i = 0; i < n; ++i) {
      place[order[i]] = i;
      sorted.push_back(std::move(index_.sites[order[i]]));
    }
    index_.sites = std::move(sorted);
    ForBoth([&](int side) {
      for (Piece& piece : index_.pieces[side]) piece.site = place[piece.site];
    });
  }

  // Also finds each site's stretch of pieces.
  void Sort(int side) {
    std::vector<Piece>& pieces = index_.pieces[side];
    std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return OrderOf(a) < OrderOf(b); });
    for (size_t i = 0; i < pieces.size();) {
      JointSite& site = index_.sites[pieces[i].site];
      site.begin[side] = i;
      while (i < pieces.size() && &index_.sites[pieces[i].site] == &site) ++i;
      site.end[side] = i;
    }
  }

  // The union of all pieces' rows. Most sites cover the same pieces as the site before, which is skipped.
  Status NumberRows() {
    std::vector<RowInterval> spans;
    for (int side : {kA, kB}) {
      const std::vector<Piece>& pieces = index_.pieces[side];
      size_t before_begin = 0, before_end = 0;
      for (const JointSite& site : index_.sites) {
        const size_t begin = site.begin[side], end = site.end[side];
        const bool same =
            end - begin == before_end - before_begin &&
            std::equal(pieces.begin() + begin, pieces.begin() + end, pieces.begin() + before_begin,
                       [](const Piece& a, const Piece& b) {
                         return a.request == b.request && a.position == b.position && a.n_rows == b.n_rows;
                       });
        before_begin = begin;
        before_end = end;
        if (same) continue;
        for (size_t i = begin; i < end; ++i) {
          const Piece& p = pieces[i];
          if (!spans.empty() && spans.back().request == p.request && p.position >= spans.back().first &&
              p.position <= int64_t{spans.back().first} + spans.back().count) {
            spans.back().count = static_cast<uint32_t>(
                std::max<int64_t>(spans.back().count, int64_t{p.position} + p.rows() - spans.back().first));
          } else {
            spans.push_back({p.request, p.position, p.rows(), 0});
          }
        }
      }
    }
    std::sort(spans.begin(), spans.end(), [](const RowInterval& a, const RowInterval& b) {
      return std::tie(a.request, a.first) < std::tie(b.request, b.first);
    });
    uint64_t base = 0;
    for (const RowInterval& span : spans) {
      std::vector<RowInterval>& out = index_.intervals;
      if (!out.empty() && out.back().request == span.request &&
          span.first <= int64_t{out.back().first} + out.back().count) {
        const int64_t end = std::max(int64_t{out.back().first} + out.back().count, int64_t{span.first} + span.count);
        base += static_cast<uint64_t>(end - out.back().first) - out.back().count;
        out.back().count = static_cast<uint32_t>(end - out.back().first);
      } else {
        // Enough to refuse; the exact number is not needed.
        if (base >= kMaxRows) break;
        out.push_back({span.request, span.first, span.count, static_cast<uint32_t>(base)});
        base += span.count;
      }
    }
    if (base >= kMaxRows) return Status::BadInput("the traces name more than 2^31 rows; compare them in parts");
    index_.n_rows = static_cast<uint32_t>(base);
    return {};
  }

  void AddNotes() {
    static constexpr const char* kNames[2] = {"A", "B"};
    for (int side : {kA, kB}) {
      const LeftOut& left = side_[side].left_out;
      auto note = [&](uint64_t count, const char* what) {
        if (count > 0) index_.notes.push_back(std::string(kNames[side]) + ": " + std::to_string(count) + " " + what);
      };
      note(left.warmup, "events of warm-up, dummy or capture passes left out");
      note(left.padding, "segments of padding rows left out");
      note(left.empty, "events without statistics (level names or shapes) cannot be compared");
      note(left.out_of_range, "segments with impossible positions or row counts left out");
    }
  }

  // Marks in Piece::request until AddUnknownRequests has run.
  static constexpr uint32_t kAnonymous = uint32_t{1} << 31;
  static constexpr uint32_t kLocal = uint32_t{1} << 30;

  // What one side's scan collects; no thread writes the other's.
  struct SideState {
    LeftOut left_out;
    std::vector<uint64_t> first_sequence;
    std::vector<uint8_t> has_rows, in_step, recorded;
    std::unordered_map<uint64_t, uint32_t> recordings;  // (site, rank): events without a request so far
    // Largest count in recordings.
    uint32_t max_anonymous = 0;
    std::unordered_map<uint64_t, uint32_t> local;
    std::vector<uint64_t> local_keys;
    uint64_t last_key = 0;
    uint32_t last_slot = 0;
  };

  int threads_;
  JointIndex index_;
  std::vector<uint32_t> joint_site_[2];
  std::unordered_map<uint64_t, uint32_t> slots_, known_;
  SideState side_[2];
  Status failure_[2];
};

}  // namespace

Result<JointIndex> JointIndex::Build(const Trace& a, const Trace& b, int threads) {
  return Builder(a, b, threads).Run();
}

// The hint is the interval of the last answer: rows of a site come in ascending order, so most calls end at it or at
// the one behind.
int64_t JointIndex::row(uint32_t request, int32_t position, size_t* hint) const {
  auto holds = [&](size_t i) {
    return i < intervals.size() && intervals[i].request == request && position >= intervals[i].first &&
           position - int64_t{intervals[i].first} < intervals[i].count;
  };
  if (!holds(*hint)) {
    if (holds(*hint + 1)) {
      ++*hint;
    } else {
      const auto it = std::upper_bound(intervals.begin(), intervals.end(), std::pair(request, position),
                                       [](const auto& key, const RowInterval& interval) {
                                         return key < std::pair(interval.request, interval.first);
                                       });
      if (it == intervals.begin()) return -1;
      const auto i = static_cast<size_t>(it - intervals.begin()) - 1;
      if (!holds(i)) return -1;
      *hint = i;
    }
  }
  const RowInterval& interval = intervals[*hint];
  return int64_t{interval.base} + position - interval.first;
}

const RowInterval& JointIndex::interval_of(uint32_t row) const {
  // Bases ascend from 0, so some interval always begins at or before the row.
  auto it = std::upper_bound(intervals.begin(), intervals.end(), row,
                             [](uint32_t r, const RowInterval& interval) { return r < interval.base; });
  return *(it - 1);
}

std::string MetaOf(const Trace& trace, std::string_view key) {
  for (const TraceProcess& process : trace.processes()) {
    for (const auto& [name, value] : process.info.meta) {
      if (name == key) return value;
    }
  }
  return {};
}

}  // namespace assay
