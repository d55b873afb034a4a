#include "trace/arrow_column.h"

#include <cstdlib>
#include <memory>
#include <utility>

namespace assay {
namespace {

// Owns what an exported schema points to.
// The consumer frees an exported struct by its release function, long after the column is gone, so each export owns
// its texts and buffers in one of these (private_data).
struct SchemaParts {
  std::string format;
  std::string name;
  std::vector<ArrowSchema> children;
  std::vector<ArrowSchema*> pointers;
};

// Owns what an exported array points to.
struct ArrayParts {
  std::vector<uint8_t> validity;
  std::vector<int32_t> offsets;
  std::vector<uint8_t> data;
  const void* buffers[3] = {};
  std::vector<ArrowArray> children;
  std::vector<ArrowArray*> pointers;
};

// A consumer may have moved a child out: it then marked it released, and it is no longer ours.
template <class Node, class Parts>
void ReleaseNode(Node* node) {
  auto* parts = static_cast<Parts*>(node->private_data);
  for (Node& child : parts->children) {
    if (child.release != nullptr) child.release(&child);
  }
  delete parts;
  node->release = nullptr;
}

// Arrow's bitmaps begin at the least significant bit of a byte.
void SetBit(std::vector<uint8_t>* bits, int64_t at, bool value) {
  const auto byte = static_cast<size_t>(at / 8);
  if (bits->size() <= byte) bits->resize(byte + 1, 0);
  if (value) (*bits)[byte] = static_cast<uint8_t>((*bits)[byte] | 1u << (at % 8));
}

// Bytes of a fixed-width value by its format letter: s S 16 bits, i I f 32, the rest (l L g, timestamps) 64.
size_t WidthOf(char format) {
  switch (format) {
    case 's':
    case 'S':
      return 2;
    case 'i':
    case 'I':
    case 'f':
      return 4;
    default:
      return 8;
  }
}

}  // namespace

ArrowColumn::ArrowColumn(std::string name, std::string format, bool nullable, std::vector<ArrowColumn> children)
    : name_(std::move(name)), format_(std::move(format)), nullable_(nullable), children_(std::move(children)) {
  if (format_ == "b") {
    kind_ = Kind::kBool;
  } else if (format_ == "u") {
    kind_ = Kind::kText;
  } else if (format_ == "+l") {
    kind_ = Kind::kList;
  } else if (format_ == "+s") {
    kind_ = Kind::kStruct;
  } else if (format_.compare(0, 3, "+w:") == 0) {
    kind_ = Kind::kFixedList;
    width_ = static_cast<size_t>(std::atoi(format_.c_str() + 3));
  } else {
    width_ = WidthOf(format_[0]);
  }
}

// The bitmap begins with the first null: columns without one hand out none, which the interface allows.
void ArrowColumn::Grew(bool valid) {
  if (!valid && validity_.empty()) {
    for (int64_t i = 0; i < length_; ++i) SetBit(&validity_, i, true);
  }
  if (!valid || !validity_.empty()) SetBit(&validity_, length_, valid);
  if (!valid) ++null_count_;
  ++length_;
}

void ArrowColumn::PushOffset(uint64_t end) {
  if (offsets_.empty()) offsets_.push_back(0);
  offsets_.push_back(static_cast<int32_t>(end));
}

void ArrowColumn::Bool(bool value) {
  SetBit(&data_, length_, value);
  Grew(true);
}

void ArrowColumn::Text(std::string_view value) {
  data_.insert(data_.end(), value.begin(), value.end());
  PushOffset(data_.size());
  Grew(true);
}

void ArrowColumn::End() {
  if (kind_ == Kind::kList) PushOffset(static_cast<uint64_t>(children_[0].length()));
  Grew(true);
}

void ArrowColumn::Null() {
  switch (kind_) {
    case Kind::kFixed:
      data_.resize(data_.size() + width_);
      break;
    case Kind::kBool:
      SetBit(&data_, length_, false);
      break;
    case Kind::kText:
      PushOffset(data_.size());
      break;
    case Kind::kList:
      PushOffset(static_cast<uint64_t>(children_[0].length()));
      break;
    case Kind::kFixedList:  // a null still has its slots in the child
      for (size_t i = 0; i < width_; ++i) children_[0].Null();
      break;
    case Kind::kStruct:
      for (ArrowColumn& child : children_) child.Null();
      break;
  }
  Grew(false);
}

uint64_t ArrowColumn::size_bytes() const {
  uint64_t bytes = validity_.size() + 4 * offsets_.size() + data_.size();
  for (const ArrowColumn& child : children_) bytes += child.size_bytes();
  return bytes;
}

// Children first: when one throws, those that were exported are released here and *out was never touched.
void ArrowColumn::ExportSchema(ArrowSchema* out) const {
  auto parts = std::make_unique<SchemaParts>();
  parts->format = format_;
  parts->name = name_;
  parts->children.resize(children_.size());
  // children has its final size, so pointers into it stay valid while they are collected.
  size_t done = 0;
  try {
    for (; done < children_.size(); ++done) {
      children_[done].ExportSchema(&parts->children[done]);
      parts->pointers.push_back(&parts->children[done]);
    }
  } catch (...) {
    for (ArrowSchema& child : parts->children) {
      if (child.release != nullptr) child.release(&child);
    }
    throw;
  }
  *out = {};
  out->format = parts->format.c_str();
  out->name = parts->name.c_str();
  out->flags = nullable_ ? ARROW_FLAG_NULLABLE : 0;
  out->n_children = static_cast<int64_t>(parts->children.size());
  out->children = parts->pointers.data();
  out->release = ReleaseNode<ArrowSchema, SchemaParts>;
  out->private_data = parts.release();
}

// Everything that may throw comes first; moving the buffers out below cannot.
void ArrowColumn::ExportArray(ArrowArray* out) {
  auto parts = std::make_unique<ArrayParts>();
  parts->children.resize(children_.size());
  try {
    for (size_t i = 0; i < children_.size(); ++i) {
      children_[i].ExportArray(&parts->children[i]);
      parts->pointers.push_back(&parts->children[i]);
    }
    if (kind_ == Kind::kText || kind_ == Kind::kList) {
      if (offsets_.empty()) offsets_.push_back(0);
    }
    if (data_.capacity() == 0) data_.reserve(8);  // a buffer of no bytes still wants an address
  } catch (...) {
    for (ArrowArray& child : parts->children) {
      if (child.release != nullptr) child.release(&child);
    }
    throw;
  }
  parts->validity = std::exchange(validity_, {});
  parts->offsets = std::exchange(offsets_, {});
  parts->data = std::exchange(data_, {});
  int64_t n_buffers = 0;
  parts->buffers[n_buffers++] = null_count_ > 0 ? parts->validity.data() : nullptr;
  if (kind_ == Kind::kText || kind_ == Kind::kList) parts->buffers[n_buffers++] = parts->offsets.data();
  if (kind_ == Kind::kText || kind_ == Kind::kFixed || kind_ == Kind::kBool) {
    parts->buffers[n_buffers++] = parts->data.data();
  }
  *out = {};
  out->length = std::exchange(length_, 0);
  out->null_count = std::exchange(null_count_, 0);
  out->n_buffers = n_buffers;
  out->buffers = parts->buffers;
  out->n_children = static_cast<int64_t>(parts->children.size());
  out->children = parts->pointers.data();
  out->release = ReleaseNode<ArrowArray, ArrayParts>;
  out->private_data = parts.release();
}

}  // namespace assay
