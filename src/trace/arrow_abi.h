// The two structs of the Arrow C data interface and the one of the C stream interface, as the Arrow columnar format
// specification gives them (https://arrow.apache.org/docs/format/CDataInterface.html and CStreamInterface.html).
// The guards are the specification's, so that another copy in the same program does no harm.
#pragma once

#include <cstdint>

extern "C" {

#ifndef ARROW_C_DATA_INTERFACE
#define ARROW_C_DATA_INTERFACE

#define ARROW_FLAG_DICTIONARY_ORDERED 1
#define ARROW_FLAG_NULLABLE 2
#define ARROW_FLAG_MAP_KEYS_SORTED 4

// Type and name of a column. release frees everything that hangs on it and marks the struct released by setting
// itself to null; the same holds for the other two.
struct ArrowSchema {
  const char* format;    // type, as "l" for int64
  const char* name;      // null: none
  const char* metadata;  // null: none
  int64_t flags;         // ARROW_FLAG_*
  int64_t n_children;
  struct ArrowSchema** children;
  struct ArrowSchema* dictionary;
  void (*release)(struct ArrowSchema*);
  void* private_data;
};

// Values of a column: `length` from element `offset` on; buffers as the format string wants them (validity bitmap
// first, null when nothing is null).
struct ArrowArray {
  int64_t length;      // elements
  int64_t null_count;  // -1: not counted
  int64_t offset;      // elements of the buffers before the first
  int64_t n_buffers;
  int64_t n_children;
  const void** buffers;
  struct ArrowArray** children;
  struct ArrowArray* dictionary;
  void (*release)(struct ArrowArray*);
  void* private_data;
};

#endif  // ARROW_C_DATA_INTERFACE

#ifndef ARROW_C_STREAM_INTERFACE
#define ARROW_C_STREAM_INTERFACE

// Batches one by one. The functions return 0 or an errno; a released array ends the stream; the error text is the
// stream's and valid until the next call.
struct ArrowArrayStream {
  int (*get_schema)(struct ArrowArrayStream*, struct ArrowSchema* out);
  int (*get_next)(struct ArrowArrayStream*, struct ArrowArray* out);
  const char* (*get_last_error)(struct ArrowArrayStream*);
  void (*release)(struct ArrowArrayStream*);
  void* private_data;
};

#endif  // ARROW_C_STREAM_INTERFACE

}  // extern "C"
