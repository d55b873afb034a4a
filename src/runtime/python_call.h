// Recording tensors of a Python program by one call of a built-in function, for probes that fire thousands of times a
// second: through ctypes, with the tensor's attributes read in Python, a call costs more than measuring a small tensor.
//
// Nothing of Python is linked: python/assay/_fast_call.py hands over the addresses of the few functions of Python's
// stable ABI that are needed, and makes the built-in functions. The tensor is read by the C function that its library
// hands out for this (DLPack's exchange API). For our own Python package alone: assay.h does not have it.
//
// All structures are written and read with Python's lock held. Objects of Python in them are compared, never kept. A
// tensor's methods may let another thread have the lock: they are asked first, and only then is a structure read that
// other threads write.
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
  uint8_t code;  // DLPack's type code
  uint8_t bits;
  uint16_t lanes;  // 1: no vector type
  int64_t* shape;
  int64_t* strides;      // elements
  uint64_t byte_offset;  // of the first element from data
};

// By address; one a process. Of Python: PyErr_Clear, PyLong_AsLongLong, Py_IncRef, Py_DecRef, PyObject_CallFunction-
// ObjArgs, PyList_Size, PyList_GetItem, PyTuple_Size, PyTuple_GetItem, PyDict_Next, PyDict_GetItem; True, False, None.
// Of the tensor library: the type of its tensors, dltensor_from_py_object_no_sync, and the methods that give a tensor's
// offset in its storage (elements) and whether its memory holds the negated values. storage_offset_of gives the offset,
// too, where the library has such a function: it is no method, and may be NULL. It takes what lies handle_at bytes from
// where a tensor begins.
struct PythonFunctions {
  void (*clear_error)();
  long long (*number)(void* object);
  void (*add_reference)(void* object);
  void (*drop_reference)(void* object);
  void* (*call)(void* function, ...);                                    // objects, then NULL; a new reference
  intptr_t (*list_size)(void* list);                                     // -1: not a list
  void* (*list_item)(void* list, intptr_t number);                       // borrowed
  intptr_t (*tuple_size)(void* tuple);                                   // -1: not a tuple
  void* (*tuple_item)(void* tuple, intptr_t number);                     // borrowed
  int (*dict_next)(void* dict, intptr_t* at, void** key, void** value);  // borrowed; 0: no more
  void* (*dict_item)(void* dict, void* key);                             // borrowed; NULL: none, without an exception
  int (*read_tensor)(void* object, DlTensor* out);                       // 0, or a Python exception is set
  void* yes;
  void* no;
  void* none;
  void* tensor_type;
  void* storage_offset;
  void* is_neg;
  int32_t (*storage_offset_of)(void* handle, int64_t* out);  // 0: good
  uint64_t handle_at;
};

// The rows of a step.
struct PythonRows {
  const assay_row_run* runs;
  uint64_t n_runs;         // 0: rows of no known request
  int64_t step;            // -1: not known
  uint32_t phase;          // ASSAY_PHASE_*
  uint32_t compute_dtype;  // 0: the tensor's own
};

// Whose the rows of a step's tensors are.
struct PythonStep {
  int64_t n_rows;
  const PythonRows* rows;  // for tensors whose axis 0 has n_rows, and ...
  const PythonRows* rest;  // ... for others
};

// One site. Either any tensor will do (shape is NULL), or those laid out like the last one.
struct PythonSite {
  assay_trace* const* trace;  // at the handle, which is NULL once the trace closes
  const assay_event* event;   // all but data, offset and rows; and but dtype, shape and strides where any will do
  const int64_t* shape;       // the tensor's own; the event's may differ (axes folded)
  const int64_t* strides;
  int32_t ndim;  // of the layout that is taken
  uint8_t code;
  uint8_t bits;
  uint16_t ready;     // 0: not yet
  int32_t result;     // of the last assay_record that was not 0
  int32_t row_axis;   // of tensors that come with rows; -1: as the site's axes say
  assay_error error;  // belongs to `result`
};

// A tensor out of which a group takes views: rank, type, and extents and strides of all axes but the first, which is
// that of the rows.
struct PythonMember {
  const int64_t* shape;  // ndim of each; the first is not looked at
  const int64_t* strides;
  int32_t ndim;  // at least 1
  uint8_t code;
  uint8_t bits;
  uint16_t reserved;
};

// What a site of a group gets: a view of a member with the same rows.
struct PythonView {
  PythonSite* site;
  const int64_t* shape;    // ndim of each; the first is the member's
  const int64_t* strides;  // ... and so is its stride
  int64_t first;           // elements from the member's first one
  int32_t ndim;            // 1 to 8
  uint32_t member;
};

// What a probe records each time that it fires: views of the same tensors. Or, with `by_row`, views of the rows that
// members[1], whole numbers, names of members[0]: that is contiguous and whole, of the very shape, and a row is as long
// as its last axis. Each view then is one of a matrix of those rows.
struct PythonGroup {
  const PythonMember* members;
  const PythonView* views;
  uint32_t n_members;  // at most 8
  uint32_t n_views;
  uint64_t by_row;
};

// What the probes of a process have in common now.
struct PythonNow {
  uint64_t on;             // 0: nothing is known of the rows
  const PythonStep* step;  // NULL: the host has none
  void* busy;              // a list: empty unless a callback runs, in which nothing is observed
};

// One member of a module's result: a tensor for `site`, or, with site NULL, something of `type` that holds none.
struct PythonPart {
  const void* key;  // in a dictionary; NULL in a tuple
  const void* type;
  PythonSite* site;
};

// A module whose results are recorded and all look alike.
struct PythonModule {
  const void* module;       // NULL: gone
  const void* result_type;  // the tensor type: parts[0] is the result itself
  const PythonPart* parts;
  uint32_t n_parts;
  uint32_t is_dict;  // else a tuple
  PythonNow* now;
  uint64_t fired;            // calls that were recorded this way
  const PythonGroup* group;  // of all its tensors, in place of the sites; NULL: none
};

// Where a call has a value.
struct PythonPlace {
  int32_t argument;  // by position; -1: the result
  int32_t member;    // of the tuple that the argument or result is; -1: itself
  void* name;        // of the argument where it is not given by position; NULL: it has none
};

// What takes the place of a probe's callback as long as its tensors look like the group's.
struct PythonShortcut {
  PythonNow* now;
  const PythonGroup* group;
  const PythonPlace* places;  // of the group's members, then n_nothing which have to be None; a compiled graph has none
  uint32_t n_places;          // without those
  uint32_t n_nothing;
  uint64_t fired;  // times that it was taken
};

// A callable that is observed, by the first argument of its calls.
struct PythonCallable {
  const void* const* owners;      // n, ascending
  PythonShortcut* const* before;  // n; NULL: nothing is recorded there
  PythonShortcut* const* after;
  uint64_t n;
};

}  // namespace assay

extern "C" {
// To be called once before the others; the functions stay where they are.
ASSAY_API void assay_python_functions(const assay::PythonFunctions* functions);

// METH_FASTCALL, with Python's lock held: (address of a PythonSite, tensor, address of PythonRows or 0). True:
// recorded, or left out by the settings. None: `result` and `error` say why not. False: nothing was done; it is not
// such a tensor.
ASSAY_API void* assay_python_record(void* self, void* const* arguments, intptr_t n_arguments);

// METH_FASTCALL, with Python's lock held: (address of a PythonGroup, address of a PythonStep, tensor, ...): True: all
// views were given to their sites, where what is not recorded is counted. False: nothing was done: there are other
// tensors than the group's, or they have not the step's rows.
ASSAY_API void* assay_python_group(void* self, void* const* arguments, intptr_t n_arguments);

// METH_FASTCALL, with Python's lock held: (address of a PythonModule's address in a table, module, result). True: all
// tensors of the result were given to their sites, where what is not recorded is counted. False: nothing was done; it
// is not such a module or result.
ASSAY_API void* assay_python_leave(void* self, void* const* arguments, intptr_t n_arguments);

// METH_FASTCALL, with Python's lock held: (a PythonCallable's address, arguments, keyword arguments). True: what is to
// be recorded before such a call was recorded, and assay_python_after is to be called behind it. False: nothing was
// done.
ASSAY_API void* assay_python_before(void* self, void* const* arguments, intptr_t n_arguments);

// METH_FASTCALL, with Python's lock held: the same and the result. False: nothing was done.
ASSAY_API void* assay_python_after(void* self, void* const* arguments, intptr_t n_arguments);

// METH_FASTCALL, with Python's lock held: (list of tensors, text), from a compiled graph. Takes the shortcut of that
// text, or calls the function that assay_python_observers was given.
ASSAY_API void* assay_python_observe(void* self, void* const* arguments, intptr_t n_arguments);

// To be called once before assay_python_observe. shortcuts: dictionary of text -> address of a PythonShortcut.
ASSAY_API void assay_python_observers(void* shortcuts, void* otherwise);

// Whether the settings let a site of this name through at some step, armed or not. trace: a handle or NULL.
ASSAY_API int32_t assay_python_lets_through(const assay_trace* trace, const char* name);

// The table for assay_python_leave: a PythonModule or NULL by number.
ASSAY_API void assay_python_modules(assay::PythonModule* const* modules, int64_t n_modules);
}
