// Reads a trace folder (or one file of it). Hostile bytes are expected: everything is bounds-checked, a damaged or
// torn record is skipped, counted and reported with file and offset, and reading goes on behind it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "trace/event.h"

namespace assay {

// Zero-copy access to one event inside a mapped file; valid while the Trace lives. Scanning a trace of millions of
// events goes through this; Decode() gives the full value.
class EventView;

// Scalars of one segment without its grids, read in place.
struct SegmentSummary {
  uint64_t request = 0;
  int64_t first_position = 0;
  int64_t n_rows = 0;
  int64_t first_row = 0;
  bool padding = false;
  uint64_t count = 0;
  // NaN and both infinities; they entered sum and sum_sq as 0.
  uint64_t nonfinite = 0;
  uint64_t nan = 0;
  uint64_t zero = 0;
  double sum = 0;
  double sum_sq = 0;
  double min = 0;
  double max = 0;
  double abs_max = 0;
  uint64_t digest = 0;
  bool digest_split = false;
  int32_t n_row_cells = 0;
  int32_t n_head_cells = 0;
};

// Every accessor reads the mapped bytes at call time: nothing is cached, nothing allocated but where a container is
// returned. Indexes are the caller's to keep in range: i < n_segments(), row < n_row_cells, head < n_head_cells.
class EventView {
 public:
  uint32_t file() const;  // index into Trace::processes()
  // Names the event in messages and to tools that read the file themselves.
  uint64_t offset() const;  // of the record in its file
  uint64_t sequence() const;
  uint64_t time_ns() const;
  uint32_t site() const;         // SiteInfo::id in that file
  uint32_t global_site() const;  // index into Trace::site_names(), common to all files
  int32_t rank() const;
  int64_t step() const;
  Phase phase() const;
  DType dtype() const;
  DType compute_dtype() const;
  uint32_t flags() const;
  Shard shard() const;
  int32_t n_segments() const;
  bool has_payload() const;
  // Value of a metadata key, in place in the file; empty when the event does not have it.
  std::string_view meta(std::string_view key) const;
  SegmentSummary segment(int32_t i) const;
  // The exponent histogram of a segment, without allocating once *out has grown; returns the number of samples.
  uint64_t histogram(int32_t i, std::vector<ExponentBin>* out) const;
  void sketch(int32_t i, double out[kSketchSize]) const;
  void row_cell(int32_t i, int32_t row, RowCell* out) const;
  uint64_t row_digest(int32_t i, int32_t row) const;  // of row_cell, without the rest
  void head_cell(int32_t i, int32_t head, HeadCell* out) const;
  // The whole event with all cells and sketches: allocates some KiB for each segment with grids.
  Event Decode() const;

 private:
  friend class Trace;
  // Shared by all views of a file (event_layout.h); keeps a view at two pointers.
  struct Layout;
  const Layout* layout_ = nullptr;
  const unsigned char* record_ = nullptr;
};

// A place where bytes of a file could not be used. Benign ones are what killed writers leave; the others mean that
// something recorded is lost.
struct Damage {
  std::string file;
  uint64_t offset = 0;
  uint64_t size_bytes = 0;  // bytes skipped
  std::string what;         // "torn tail", "checksum mismatch", "hole", "unknown record kind 37" …
  bool benign = false;      // a torn tail, a hole of an uncommitted record, an unknown kind of a newer minor version
};

struct TraceProcess {
  std::string file;
  ProcessInfo info;
  std::vector<SiteInfo> sites;  // sites[id].id == id; a name whose record is lost is "lost-site-ID"
  std::vector<RequestInfo> requests;
  std::vector<CoverageNote> coverage;
  DropCounts drops;
  bool closed = false;  // the writer reached Close()
};

// An opened trace. Reading is thread-safe; views and payload spans must not outlive it.
class Trace {
 public:
  // path: a trace folder, or one .assay file. kBadInput: not a trace, no file in it, or a newer major version.
  // kEnvironment: cannot be read, or not enough memory. Files are indexed in parallel: 8 bytes an event.
  static Result<std::unique_ptr<Trace>> Open(const std::string& path);
  // One trace file that is in memory already; bytes (8-aligned) must outlive the Trace. name stands for the path.
  static Result<std::unique_ptr<Trace>> FromBytes(std::span<const unsigned char> bytes, const std::string& name);
  ~Trace();

  const std::string& path() const;
  // One for each readable file, ordered by rank, start time, file name.
  const std::vector<TraceProcess>& processes() const;
  // Of all files, at most DamageList::kMaxListed + 1 a file.
  const std::vector<Damage>& damages() const;
  const std::vector<std::string>& site_names() const;  // distinct names over all files
  uint64_t event_count() const;
  // i in [0, event_count()), ordered by file, then by offset.
  EventView event(uint64_t i) const;
  // Bytes of a payload, mapped; they live as long as the Trace. Thread-safe. Checked against its size and (once) its
  // SHA-256.
  Result<std::span<const std::byte>> payload(const PayloadRef& ref) const;
  // Payloads that payload() could not give so far: missing, of another size or content. Each once; offset 0.
  std::vector<Damage> payload_damages() const;

 private:
  Trace();
  static Result<std::unique_ptr<Trace>> OpenPath(const std::string& path);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace assay
