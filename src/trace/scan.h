// Walks the records of one trace file in memory, over holes, torn tails and damage. Linear in the file's size whatever
// the bytes are.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "trace/format.h"
#include "trace/reader.h"

namespace assay {

struct Record {
  const unsigned char* at = nullptr;  // of the record header, inside the bytes that are scanned
  uint64_t offset = 0;                // in the file
  uint32_t size_bytes = 0;            // of the whole record, padding included
  uint16_t kind = 0;                  // format::kKind*, or one of a newer version
  // Behind the record header.
  std::span<const unsigned char> body() const {
    return {at + sizeof(format::RecordHeader), size_bytes - sizeof(format::RecordHeader)};
  }
};

// Damages of one file. Past kMaxListed they are only counted, so that a hostile file cannot fill memory.
class DamageList {
 public:
  static constexpr size_t kMaxListed = 1000;
  explicit DamageList(std::string file) : file_(std::move(file)) {}
  void Add(uint64_t offset, uint64_t size_bytes, std::string what, bool benign);
  // The list, closed by one entry for all that were not listed.
  std::vector<Damage> Take();

 private:
  std::string file_;
  std::vector<Damage> listed_;
  uint64_t unlisted_ = 0;
  uint64_t unlisted_bytes_ = 0;
  bool unlisted_benign_ = true;
};

class RecordScanner {
 public:
  // bytes: the whole file; records are looked for in [begin, limit). limit <= bytes.size().
  // damages must outlive the scanner.
  RecordScanner(std::span<const unsigned char> bytes, uint64_t begin, uint64_t limit, DamageList* damages);

  // The next committed record with a good checksum; false at the end.
  bool Next(Record* out);
  // Behind the last record or hole that was understood.
  uint64_t end_of_records() const { return end_of_records_; }
  // The last record is cut, and that has been reported.
  bool torn() const { return torn_; }

 private:
  // A size as the format allows it, inside the limit.
  bool SaneSize(uint64_t offset, uint64_t size_bytes) const;
  // The checksum of the record here matches. REQUIRES: SaneSize.
  bool CheckAt(uint64_t offset, Record* out) const;
  bool StartsLikeRecord(uint64_t offset) const;
  // Next multiple of 8 with a committed record whose checksum matches, or the limit; spends the budget.
  uint64_t Resync(uint64_t from);

  std::span<const unsigned char> bytes_;
  uint64_t limit_;
  // Where the next record is looked for; a multiple of 8, at most limit_.
  uint64_t position_;
  uint64_t end_of_records_;
  bool torn_ = false;
  uint64_t resync_budget_;  // bytes that may still be checksummed in vain
  DamageList* damages_;
};

}  // namespace assay
