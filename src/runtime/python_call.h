// Recording a tensor of a Python program by one call of a built-in function, for probes that fire thousands of times a
// second: through ctypes, with the tensor's attributes read in Python, a call costs more than measuring a small tensor.
//
// Nothing of Python is linked: python/assay/_fast_call.py hands over the addresses of the few functions of Python's
// stable ABI that are needed, and makes the built-in function. The tensor is read by the C function that its library
// hands out for this (DLPack's exchange API). For our own Python package alone: assay.h does not have it.
#pragma once

#include <cstdint>

#include "assay/assay.h"

namespace assay {

// DLPack 1.x: a tensor that somebody else owns.
struct DlTensor {
  void* data;
  int32_t device_type;  // 1: host memory
  int32_t device_id;
  int32_t ndim;
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // elements
  uint64_t byte_offset;
};

// By address; one a process. Of Python: PyErr_Clear, PyLong_AsLongLong, Py_IncRef; True, False, None. Of the tensor
// library: dltensor_from_py_object_no_sync.
struct PythonFunctions {
  void (*clear_error)();
  long long (*number)(void* object);
  void (*add_reference)(void* object);
  int (*read_tensor)(void* object, DlTensor* out);  // 0, or a Python exception is set
  void* yes;
  void* no;
  void* none;
};

// The rows of a step.
struct PythonRows {
  const assay_row_run* runs;
  uint64_t n_runs;
  int64_t step;
  uint32_t phase;
  uint32_t compute_dtype;
};

// One site, with the layout that its last tensor had. Written and read with Python's lock held.
struct PythonSite {
  assay_trace* const* trace;  // at the handle, which is NULL once the trace closes
  const assay_event* event;   // all but data, offset and rows
  const int64_t* shape;       // the tensor's own; the event's may differ (axes folded)
  const int64_t* strides;
  int32_t ndim;
  uint8_t code;
  uint8_t bits;
  uint16_t ready;  // 0: no layout yet
  int32_t result;  // of the last assay_record that was not 0
  uint32_t reserved;
  assay_error error;
};

}  // namespace assay

extern "C" {
// To be called once before the first assay_python_record; the functions stay where they are.
ASSAY_API void assay_python_functions(const assay::PythonFunctions* functions);

// METH_FASTCALL, with Python's lock held: (address of a PythonSite; tensor of the library that read_tensor belongs to;
// its offset in its storage, in elements; address of PythonRows or 0). True: recorded, or left out by the settings.
// None: `result` and `error` say why not. False: nothing was done, as the layout is another one than the last.
ASSAY_API void* assay_python_record(void* self, void* const* arguments, intptr_t n_arguments);
}
