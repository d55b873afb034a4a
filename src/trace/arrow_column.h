// Builds Arrow columns row by row and hands them out through the C data interface. Only what the event table needs:
// fixed-width values, booleans, text, lists, fixed-size lists and structs, all little-endian.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "trace/arrow_abi.h"

namespace assay {

class ArrowColumn {
 public:
  // format: the interface's type string ("L", "u", "+l", "+w:64", …). Children: one for a list, any number for "+s".
  ArrowColumn(std::string name, std::string format, bool nullable, std::vector<ArrowColumn> children = {});

  // --- appending one value; T must have the width of the format -----------------------------------------------------
  template <class T>
  void Value(T value) {
    const size_t at = data_.size();
    data_.resize(at + sizeof value);
    std::memcpy(data_.data() + at, &value, sizeof value);
    Grew(true);
  }
  void Bool(bool value);
  void Text(std::string_view value);
  // Ends a list, fixed-size list or struct whose elements were appended to the children.
  void End();
  // Appends a null with the slots that it needs in buffers and children.
  void Null();

  // Valid as long as the column; elements of a list are appended here before End().
  ArrowColumn& child(size_t i) { return children_[i]; }
  int64_t length() const { return length_; }
  uint64_t size_bytes() const;  // of all buffers, children included

  // Fill *out; the caller owns it and calls its release. ExportArray moves the values out and leaves the column empty.
  // May throw std::bad_alloc, *out is then unchanged.
  void ExportSchema(ArrowSchema* out) const;
  void ExportArray(ArrowArray* out);

 private:
  // What the format string means for the buffers.
  enum class Kind { kFixed, kBool, kText, kList, kFixedList, kStruct };

  // Counts the value that was just appended and keeps the bitmap.
  void Grew(bool valid);
  // end: bytes (text) or elements (list) up to and with the value that was just appended; below 2^31.
  void PushOffset(uint64_t end);

  std::string name_;
  std::string format_;
  bool nullable_;
  Kind kind_ = Kind::kFixed;
  size_t width_ = 0;  // bytes of a fixed-width value, elements of a fixed-size list
  std::vector<ArrowColumn> children_;

  int64_t length_ = 0;
  int64_t null_count_ = 0;
  std::vector<uint8_t> validity_;  // bitmap, empty while nothing is null
  // 32 bits: a batch stays far below 2 GiB (ArrowExportOptions::batch_bytes).
  std::vector<int32_t> offsets_;
  // Values as they lie in memory; a bitmap for booleans; the bytes of all texts.
  std::vector<uint8_t> data_;
};

}  // namespace assay
