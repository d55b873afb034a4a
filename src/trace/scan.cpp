#include "trace/scan.h"

#include <algorithm>
#include <cstring>

#include "trace/codec.h"

namespace assay {
namespace {

using format::RecordHeader;

// Tag (low half) and size of the record that begins here; the offset need not be aligned in memory.
uint64_t WordAt(std::span<const unsigned char> bytes, uint64_t offset) {
  uint64_t word;
  std::memcpy(&word, bytes.data() + offset, 8);
  return word;
}

}  // namespace

void DamageList::Add(uint64_t offset, uint64_t size_bytes, std::string what, bool benign) {
  if (listed_.size() < kMaxListed) {
    listed_.push_back({file_, offset, size_bytes, std::move(what), benign});
    return;
  }
  ++unlisted_;
  unlisted_bytes_ += size_bytes;
  unlisted_benign_ = unlisted_benign_ && benign;
}

// Leaves the list empty.
std::vector<Damage> DamageList::Take() {
  if (unlisted_ > 0) {
    const Damage& last = listed_.back();
    listed_.push_back({file_, last.offset + last.size_bytes, unlisted_bytes_,
                       std::to_string(unlisted_) + " further damages", unlisted_benign_});
  }
  return std::move(listed_);
}

RecordScanner::RecordScanner(std::span<const unsigned char> bytes, uint64_t begin, uint64_t limit, DamageList* damages)
    : bytes_(bytes),
      limit_(limit / format::kAlign * format::kAlign),
      position_(std::min(begin, limit_)),  // a file that is cut inside its header has no records
      end_of_records_(position_),
      resync_budget_(4 * uint64_t{bytes.size()} + format::kMaxRecordBytes),
      damages_(damages) {}

bool RecordScanner::SaneSize(uint64_t offset, uint64_t size_bytes) const {
  return size_bytes >= sizeof(RecordHeader) && size_bytes % format::kAlign == 0 &&
         size_bytes <= format::kMaxRecordBytes && size_bytes <= limit_ - offset;
}

bool RecordScanner::CheckAt(uint64_t offset, Record* out) const {
  RecordHeader header;
  std::memcpy(&header, bytes_.data() + offset, sizeof header);
  if (codec::RecordCrc(bytes_.data() + offset, header.size_bytes) != header.crc) return false;
  *out = {bytes_.data() + offset, offset, header.size_bytes, header.kind};
  return true;
}

// Nothing, free space, or a tag: what may follow a record.
bool RecordScanner::StartsLikeRecord(uint64_t offset) const {
  if (limit_ - offset < 8) return true;
  const uint64_t word = WordAt(bytes_, offset);
  const auto tag = static_cast<uint32_t>(word);
  return word == 0 || tag == format::kTagCommitted || tag == format::kTagReserved;
}

// Offset of the next record that verifies, or limit_. Each candidate costs at most its own size; the budget keeps a
// file full of forged headers from costing more than a few passes.
uint64_t RecordScanner::Resync(uint64_t from) {
  for (uint64_t at = from; limit_ - at >= sizeof(RecordHeader); at += format::kAlign) {
    RecordHeader header;
    std::memcpy(&header, bytes_.data() + at, sizeof header);
    if (header.tag != format::kTagCommitted || !SaneSize(at, header.size_bytes)) continue;
    if (header.size_bytes > resync_budget_) return limit_;
    resync_budget_ -= header.size_bytes;
    Record record;
    if (CheckAt(at, &record)) return at;
  }
  return limit_;
}

// One pass: each step moves position_ on by at least 8. A record is only handed out with a matching checksum; whether
// its body makes sense is for the codec to say.
bool RecordScanner::Next(Record* out) {
  for (;;) {
    const uint64_t gap_begin = position_;
    while (limit_ - position_ >= 8 && WordAt(bytes_, position_) == 0) position_ += 8;
    if (limit_ - position_ < 8) return false;  // free space up to the end: the caller's torn tail
    if (position_ != gap_begin) {
      damages_->Add(gap_begin, position_ - gap_begin, "hole: reserved, never written", true);
    }
    const uint64_t at = position_;
    const bool whole_header = limit_ - at >= sizeof(RecordHeader);
    RecordHeader header{};
    std::memcpy(&header, bytes_.data() + at, whole_header ? sizeof header : 8);
    const bool sane = whole_header && SaneSize(at, header.size_bytes);

    if (sane && header.tag == format::kTagReserved && StartsLikeRecord(at + header.size_bytes)) {
      damages_->Add(at, header.size_bytes, "hole: record reserved, never committed", true);
      position_ = end_of_records_ = at + header.size_bytes;
      continue;
    }
    if (sane && header.tag == format::kTagCommitted && CheckAt(at, out)) {
      position_ = end_of_records_ = at + header.size_bytes;
      return true;
    }
    position_ = Resync(at + format::kAlign);
    if (position_ == limit_) {
      // Nothing that verifies behind: a record that begins well and is cut by the end of the file is a torn tail.
      const bool cut = header.size_bytes <= format::kMaxRecordBytes && header.size_bytes > limit_ - at &&
                       (header.tag == format::kTagCommitted || header.tag == format::kTagReserved);
      if (cut || !whole_header) {
        damages_->Add(at, bytes_.size() - at, "torn tail: record cut by the end of the file", true);
        torn_ = true;
        return false;
      }
    }
    const char* what = "not a record; skipped to the next good one";
    if (header.tag == format::kTagCommitted) what = sane ? "checksum mismatch" : "bad record length";
    if (header.tag == format::kTagReserved) what = "bad length of a reserved record";
    damages_->Add(at, position_ - at, what, false);
    end_of_records_ = position_;
    if (position_ == limit_) return false;
  }
}

}  // namespace assay
