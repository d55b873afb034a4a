#include "runtime/python_call.h"

#include <algorithm>
#include <cstddef>

namespace {

using assay::DlTensor;
using assay::PythonFunctions;
using assay::PythonRows;
using assay::PythonSite;

static_assert(sizeof(DlTensor) == 48 && sizeof(PythonRows) == 32 && offsetof(PythonSite, error) == 48,
              "python/assay/_fast_call.py mirrors them");

constexpr int32_t kHostMemory = 1;

const PythonFunctions* python = nullptr;  // set with Python's lock held, as it is read

bool HasLayout(const DlTensor& tensor, const PythonSite& site) {
  return tensor.device_type == kHostMemory && tensor.ndim == site.ndim && tensor.code == site.code &&
         tensor.bits == site.bits && tensor.lanes == 1 && tensor.data != nullptr && tensor.strides != nullptr &&
         std::equal(site.shape, site.shape + site.ndim, tensor.shape) &&
         std::equal(site.strides, site.strides + site.ndim, tensor.strides);
}

void* Answer(void* object) {
  python->add_reference(object);
  return object;
}

template <class T>
T* At(void* number) {
  return reinterpret_cast<T*>(static_cast<intptr_t>(python->number(number)));
}

}  // namespace

extern "C" {

void assay_python_functions(const PythonFunctions* functions) { python = functions; }

void* assay_python_record(void*, void* const* arguments, intptr_t n_arguments) {
  if (n_arguments != 4) return Answer(python->no);
  auto* site = At<PythonSite>(arguments[0]);
  assay_trace* trace = site->trace == nullptr ? nullptr : *site->trace;
  DlTensor tensor{};
  if (site->ready == 0 || trace == nullptr) return Answer(python->no);
  if (python->read_tensor(arguments[1], &tensor) != 0) {
    python->clear_error();
    return Answer(python->no);
  }
  if (!HasLayout(tensor, *site)) return Answer(python->no);
  assay_event event = *site->event;
  event.offset = python->number(arguments[2]);
  // An event's data is where the storage begins.
  event.data = static_cast<const char*>(tensor.data) + tensor.byte_offset - event.offset * (site->bits / 8);
  event.n_runs = 0;
  event.step = -1;
  event.phase = 0;
  event.compute_dtype = 0;
  if (const auto* rows = At<const PythonRows>(arguments[3])) {
    event.runs = rows->runs;
    event.n_runs = rows->n_runs;
    event.step = rows->step;
    event.phase = rows->phase;
    event.compute_dtype = rows->compute_dtype;
  }
  const int result = assay_record(trace, &event, &site->error);
  if (result == 0) return Answer(python->yes);
  site->result = result;
  return Answer(python->none);
}

}  // extern "C"
