#include "runtime/python_call.h"

#include <algorithm>
#include <cstddef>
#include <functional>

#include "probe/recorder.h"

namespace {

using assay::DlTensor;
using assay::PythonCallable;
using assay::PythonFunctions;
using assay::PythonGroup;
using assay::PythonMember;
using assay::PythonModule;
using assay::PythonNow;
using assay::PythonPart;
using assay::PythonPlace;
using assay::PythonRows;
using assay::PythonShortcut;
using assay::PythonSite;
using assay::PythonStep;
using assay::PythonView;

static_assert(sizeof(DlTensor) == 48 && sizeof(PythonRows) == 32 && offsetof(PythonSite, error) == 48 &&
                  sizeof(PythonStep) == 24 && sizeof(PythonNow) == 24 && sizeof(PythonPart) == 24 &&
                  sizeof(PythonModule) == 56 && sizeof(PythonMember) == 24 && sizeof(PythonView) == 40 &&
                  sizeof(PythonGroup) == 32 && sizeof(PythonPlace) == 16 && sizeof(PythonShortcut) == 40 &&
                  sizeof(PythonCallable) == 32,
              "python/assay/_fast_call.py mirrors them");

constexpr int32_t kHostMemory = 1;

// Elements of a tensor that may be measured with Python's lock held: a tenth of a millisecond or two, where another
// thread waits up to five until it may ask for the lock.
constexpr int64_t kLargest = 262144;

// Members of one result: fixed arrays on the stack suffice, and modules return few tensors.
constexpr intptr_t kMaxParts = 8;

constexpr int32_t kMaxRank = 8;  // of a view

const PythonFunctions* python = nullptr;  // set with Python's lock held, as it is read
PythonModule* const* modules = nullptr;   // the same
int64_t n_modules = 0;
void* shortcuts = nullptr;  // of compiled graphs
void* otherwise = nullptr;  // what is called where there is none

// An event's data type by DLPack's code and bits; 0: none of those that are taken here.
uint32_t DtypeOf(uint8_t code, uint8_t bits) {
  switch (code << 8 | bits) {
    case 2 << 8 | 64:
      return ASSAY_DTYPE_F64;
    case 2 << 8 | 32:
      return ASSAY_DTYPE_F32;
    case 2 << 8 | 16:
      return ASSAY_DTYPE_F16;
    case 4 << 8 | 16:
      return ASSAY_DTYPE_BF16;
    case 0 << 8 | 64:
      return ASSAY_DTYPE_I64;
    case 0 << 8 | 32:
      return ASSAY_DTYPE_I32;
    case 6 << 8 | 8:
      return ASSAY_DTYPE_BOOL;
    default:
      return 0;
  }
}

const void* TypeOf(const void* object) {
  const void* type;  // behind the reference count: the head of an object is part of the stable ABI
  std::copy_n(static_cast<const char*>(object) + sizeof(intptr_t), sizeof type, reinterpret_cast<char*>(&type));
  return type;
}

// What a method without arguments gives; -1 when it raises.
long long Call(void* method, void* tensor) {
  void* answer = python->call(method, tensor, nullptr);
  if (answer == nullptr) {
    python->clear_error();
    return -1;
  }
  const long long value = answer == python->yes ? 1 : answer == python->no ? 0 : python->number(answer);
  python->drop_reference(answer);
  return value;
}

struct Tensor {
  DlTensor dl;
  int64_t offset;
  uint32_t dtype;
};

// Size-one axes count too: the cached event has one shape and one set of strides.
bool HasLayout(const DlTensor& tensor, const PythonSite& site) {
  return tensor.ndim == site.ndim && tensor.code == site.code && tensor.bits == site.bits &&
         std::equal(site.shape, site.shape + site.ndim, tensor.shape) &&
         std::equal(site.strides, site.strides + site.ndim, tensor.strides);
}

// Reads a tensor of any size in host memory; false: it is another's business.
bool ReadWhole(void* object, Tensor* out) {
  if (TypeOf(object) != python->tensor_type) return false;
  DlTensor& dl = out->dl;
  if (python->read_tensor(object, &dl) != 0) {
    python->clear_error();
    return false;
  }
  out->dtype = DtypeOf(dl.code, dl.bits);
  if (dl.device_type != kHostMemory || dl.lanes != 1 || out->dtype == 0 || dl.data == nullptr) return false;
  return dl.ndim == 0 || (dl.shape != nullptr && dl.strides != nullptr);
}

// Reads a tensor that could be recorded.
bool Read(void* object, Tensor* out) {
  if (!ReadWhole(object, out)) return false;
  const DlTensor& dl = out->dl;
  int64_t n = 1;
  for (int32_t i = 0; i < dl.ndim; ++i) {
    // Each extent is checked before the product, so that it stays within 2^36.
    if (dl.shape[i] > kLargest || (n *= dl.shape[i]) > kLargest) return false;
  }
  return n != 0;
}

// Whether something of a tensor that was read is known to its methods alone. Negated memory is that of imaginary parts,
// which come in the types that complex numbers have.
bool HasToBeAsked(const Tensor& tensor) {
  return tensor.dtype != ASSAY_DTYPE_BF16 || python->storage_offset_of == nullptr;
}

// Asks the methods of a tensor that was read. They may give the lock away or run code of the host (a
// TorchFunctionMode): behind this, all may be another that the caller holds no reference to, and the tensor's layout.
bool Ask(void* object, Tensor* tensor) {
  if (tensor->dtype != ASSAY_DTYPE_BF16 && Call(python->is_neg, object) != 0) return false;
  tensor->offset = Call(python->storage_offset, object);
  return tensor->offset >= 0;
}

// What has not to be asked of a tensor that was read.
bool Complete(void* object, Tensor* tensor) {
  return python->storage_offset_of(static_cast<char*>(object) + python->handle_at, &tensor->offset) == 0 &&
         tensor->offset >= 0;
}

// Reads a tensor anew that was asked. What it gives holds as long as the lock is kept.
bool ReadAgain(void* object, Tensor* tensor) {
  const uint32_t dtype = tensor->dtype;
  return Read(object, tensor) && tensor->dtype == dtype;  // the answers are those of this type
}

// Whether the site may record it now.
bool Takes(const PythonSite& site, const Tensor& tensor) {
  return site.ready != 0 && *site.trace != nullptr && (site.shape == nullptr || HasLayout(tensor.dl, site));
}

// Whether its trace is open and records nothing now.
bool IsDisarmed(const PythonSite& site) {
  const assay_trace* trace = *site.trace;
  return trace != nullptr && assay_armed(trace) == 0;
}

const PythonRows* RowsOf(const Tensor& tensor, const PythonStep* step) {
  if (step == nullptr) return nullptr;
  const bool fit = tensor.dl.ndim > 0 && tensor.dl.shape[0] == step->n_rows;
  return fit ? step->rows : step->rest;
}

// The result of assay_record.
int Record(const Tensor& tensor, const PythonRows* rows, PythonSite* site) {
  const DlTensor& dl = tensor.dl;
  assay_event event = *site->event;
  if (site->shape == nullptr) {
    event.dtype = tensor.dtype;
    event.ndim = dl.ndim;
    event.shape = dl.shape;
    event.strides = dl.strides;
  }
  event.offset = tensor.offset;
  // An event's data is where the storage begins.
  event.data = static_cast<const char*>(dl.data) + dl.byte_offset - tensor.offset * (dl.bits / 8);
  event.n_runs = 0;
  event.step = -1;
  event.phase = 0;
  if (rows != nullptr) {
    event.runs = rows->runs;
    event.n_runs = rows->n_runs;
    if (rows->n_runs != 0 && site->row_axis >= 0) event.row_axis = site->row_axis;
    event.step = rows->step;
    event.phase = rows->phase;
    if (rows->compute_dtype != 0) event.compute_dtype = rows->compute_dtype;
  }
  const int result = assay_record(*site->trace, &event, &site->error);
  if (result != 0) site->result = result;
  return result;
}

void* Answer(void* object) {
  python->add_reference(object);
  return object;
}

template <class T>
T* At(void* number) {
  return reinterpret_cast<T*>(static_cast<intptr_t>(python->number(number)));
}

// The members of a result in their order, `n` of them; false: it does not look like the module's results. REQUIRES: at
// most kMaxParts.
bool TakeApart(const PythonModule& module, void* result, void** members) {
  if (TypeOf(result) != module.result_type) return false;
  if (module.result_type == python->tensor_type) {
    members[0] = result;
    return true;
  }
  const auto n = static_cast<intptr_t>(module.n_parts);
  if (module.is_dict == 0 && python->tuple_size(result) != n) return false;
  intptr_t at = 0;
  for (intptr_t i = 0; i < n; ++i) {
    void* key = nullptr;
    if (module.is_dict == 0) {
      members[i] = python->tuple_item(result, i);
    } else if (python->dict_next(result, &at, &key, &members[i]) == 0) {
      return false;
    }
    if (key != module.parts[i].key || TypeOf(members[i]) != module.parts[i].type) return false;
  }
  void *key, *value;
  return module.is_dict == 0 || python->dict_next(result, &at, &key, &value) == 0;
}

// The module of a number, if it is to be recorded now; NULL otherwise.
PythonModule* ModuleAt(int64_t number, const void* object) {
  // The table may have been replaced by a shorter one since Python read the number.
  if (number < 0 || number >= n_modules) return nullptr;
  PythonModule* module = modules[number];
  if (module == nullptr || module->module != object || module->n_parts > kMaxParts) return nullptr;
  return module->now->on != 0 && python->list_size(module->now->busy) == 0 ? module : nullptr;
}

// References to a result's members: a dictionary's may be taken out of it while Python is asked about them.
class Held {
 public:
  Held() = default;
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    for (uint32_t i = 0; i < n_; ++i) python->drop_reference(objects_[i]);
  }
  // At most kMaxParts.
  void Add(void* object) {
    python->add_reference(object);
    objects_[n_++] = object;
  }

 private:
  void* objects_[kMaxParts];
  uint32_t n_ = 0;
};

// All views are of one trace.
bool IsDisarmed(const PythonGroup& group) { return group.n_views != 0 && IsDisarmed(*group.views[0].site); }

// Then nothing is looked at. REQUIRES: nothing; all parts are of one trace.
bool IsDisarmed(const PythonModule& module) {
  if (module.group != nullptr) return IsDisarmed(*module.group);
  for (uint32_t i = 0; i < module.n_parts; ++i) {
    if (module.parts[i].site != nullptr) return IsDisarmed(*module.parts[i].site);
  }
  return false;
}

bool IsMember(const DlTensor& tensor, const PythonMember& member, int64_t n_rows) {
  const auto rest = member.ndim - 1;
  return tensor.ndim == member.ndim && tensor.code == member.code && tensor.bits == member.bits &&
         tensor.shape[0] == n_rows && std::equal(member.shape + 1, member.shape + 1 + rest, tensor.shape + 1) &&
         std::equal(member.strides + 1, member.strides + 1 + rest, tensor.strides + 1);
}

// Gives the views of members their sites. False: a site has not what it needs, and none was given anything.
bool RecordViews(const PythonGroup& group, const Tensor* members, const PythonRows* rows) {
  for (uint32_t v = 0; v < group.n_views; ++v) {
    const PythonSite& site = *group.views[v].site;
    if (site.ready == 0 || *site.trace == nullptr || site.shape != nullptr) return false;
  }
  for (uint32_t v = 0; v < group.n_views; ++v) {
    const PythonView& view = group.views[v];
    const Tensor& member = members[view.member];
    int64_t shape[kMaxRank], strides[kMaxRank];
    std::copy_n(view.shape, view.ndim, shape);
    std::copy_n(view.strides, view.ndim, strides);
    shape[0] = member.dl.shape[0];
    strides[0] = member.dl.strides[0];
    Tensor part = member;
    part.dl.ndim = view.ndim;
    part.dl.shape = shape;
    part.dl.strides = strides;
    part.dl.byte_offset += static_cast<uint64_t>(view.first * (member.dl.bits / 8));
    part.offset += view.first;
    (void)Record(part, rows, view.site);  // what is lost is counted there
  }
  return true;
}

// Of a group by row: the rows of objects[0] that objects[1] names, one behind the other. Numbers of rows behind the
// step's are those of padding.
bool RecordByRow(const PythonGroup& group, const PythonStep& step, void* const* objects) {
  alignas(64) static char copies[kLargest * sizeof(uint16_t)];  // Python's lock guards it
  Tensor whole, numbers;
  if (!ReadWhole(objects[0], &whole) || !Read(objects[1], &numbers)) return false;
  if (whole.dtype != ASSAY_DTYPE_BF16) return false;  // others would have to be asked
  const PythonMember& member = group.members[0];
  const DlTensor &from = whole.dl, &at = numbers.dl;
  if (from.ndim != member.ndim || from.code != member.code || from.bits != member.bits ||
      !std::equal(member.shape, member.shape + member.ndim, from.shape) ||
      !std::equal(member.strides, member.strides + member.ndim, from.strides)) {
    return false;
  }
  if (numbers.dtype != ASSAY_DTYPE_I64 || at.ndim != 1 || at.strides[0] != 1 || at.shape[0] < step.n_rows) return false;
  int64_t width = from.shape[from.ndim - 1], n = 1;
  for (int32_t i = 0; i + 1 < from.ndim; ++i) n *= from.shape[i];  // it exists, so this is no overflow
  if (step.n_rows <= 0 || width <= 0 || step.n_rows > kLargest || width > kLargest / step.n_rows) return false;
  const auto* number = reinterpret_cast<const int64_t*>(static_cast<const char*>(at.data) + at.byte_offset);
  const char* first = static_cast<const char*>(from.data) + from.byte_offset;
  const int64_t row_bytes = width * (from.bits / 8);
  for (int64_t row = 0; row < step.n_rows; ++row) {
    if (number[row] < 0 || number[row] >= n) return false;
    std::copy_n(first + number[row] * row_bytes, row_bytes, copies + row * row_bytes);
  }
  int64_t shape[] = {step.n_rows, width}, strides[] = {width, 1};
  whole.dl.data = copies;
  whole.dl.byte_offset = 0;
  whole.dl.ndim = 2;
  whole.dl.shape = shape;
  whole.dl.strides = strides;
  whole.offset = 0;
  return RecordViews(group, &whole, step.rows);
}

const PythonStep* StepOf(const PythonNow& now) { return now.on != 0 ? now.step : nullptr; }

// As in Leave: all are asked first where it has to be, then looked at, and only then is one recorded.
bool RecordGroup(const PythonGroup& group, const PythonNow& now, void* const* objects, intptr_t n) {
  const PythonStep* step = StepOf(now);
  if (step == nullptr || n > kMaxParts) return false;
  if (IsDisarmed(group)) return true;
  if (group.n_members != static_cast<uint32_t>(n)) return false;
  if (group.by_row != 0) return n == 2 && RecordByRow(group, *step, objects);
  Tensor tensors[kMaxParts];
  bool asks = false;
  for (intptr_t i = 0; i < n; ++i) {
    if (!Read(objects[i], &tensors[i])) return false;
    asks |= HasToBeAsked(tensors[i]);
  }
  for (intptr_t i = 0; asks && i < n; ++i) {
    if (!Ask(objects[i], &tensors[i])) return false;
  }
  if ((step = StepOf(now)) == nullptr) return false;  // another by now, when they were asked
  for (intptr_t i = 0; i < n; ++i) {
    const bool good = asks ? ReadAgain(objects[i], &tensors[i]) : Complete(objects[i], &tensors[i]);
    if (!good || !IsMember(tensors[i].dl, group.members[i], step->n_rows)) return false;
  }
  return RecordViews(group, tensors, step->rows);
}

// True: every tensor of the result was given to its site. False: nothing was done, and the caller goes the long way.
bool Leave(int64_t number, const void* object, void* result) {
  PythonModule* before = ModuleAt(number, object);
  void* members[kMaxParts] = {};
  if (before == nullptr || !TakeApart(*before, result, members)) return false;
  const uint32_t n = before->n_parts;
  if (IsDisarmed(*before)) {
    ++before->fired;
    return true;
  }
  if (before->group != nullptr) {
    const PythonModule& module = *before;
    void* values[kMaxParts];
    intptr_t n_values = 0;
    Held held;
    for (uint32_t i = 0; i < n; ++i) {
      if (TypeOf(members[i]) != python->tensor_type) continue;
      held.Add(values[n_values++] = members[i]);
    }
    if (!RecordGroup(*module.group, *module.now, values, n_values)) return false;
    ++before->fired;
    return true;
  }
  Tensor tensors[kMaxParts];
  bool asks = false;
  for (uint32_t i = 0; i < n; ++i) {
    if (TypeOf(members[i]) != python->tensor_type) continue;
    if (!Read(members[i], &tensors[i])) return false;
    asks |= HasToBeAsked(tensors[i]);
  }
  // All are looked at before one is recorded, or the long way would record some twice.
  PythonModule* module = before;
  Held held;
  if (asks) {
    void* asked[kMaxParts];
    std::copy_n(members, n, asked);
    for (uint32_t i = 0; i < n; ++i) held.Add(asked[i]);
    for (uint32_t i = 0; i < n; ++i) {
      if (TypeOf(asked[i]) == python->tensor_type && !Ask(asked[i], &tensors[i])) return false;
    }
    // From here on the lock is kept: module and result are looked at anew.
    module = ModuleAt(number, object);
    if (module == nullptr || !TakeApart(*module, result, members)) return false;
    if (module->n_parts != n || !std::equal(members, members + n, asked)) return false;
  }
  for (uint32_t i = 0; i < n; ++i) {
    const PythonSite* site = module->parts[i].site;
    if (site == nullptr) continue;
    const bool good = asks ? ReadAgain(members[i], &tensors[i]) : Complete(members[i], &tensors[i]);
    if (!good || !Takes(*site, tensors[i])) return false;
  }
  ++module->fired;
  for (uint32_t i = 0; i < n; ++i) {
    PythonSite* site = module->parts[i].site;
    if (site == nullptr) continue;
    (void)Record(tensors[i], RowsOf(tensors[i], module->now->step), site);  // what is lost is counted there
  }
  return true;
}

// Whether the shortcut is for what the host does now.
bool IsOpen(const PythonShortcut& shortcut) {
  return StepOf(*shortcut.now) != nullptr && python->list_size(shortcut.now->busy) == 0;
}

bool Take(PythonShortcut* shortcut, void* const* values, intptr_t n) {
  if (!IsOpen(*shortcut) || !RecordGroup(*shortcut->group, *shortcut->now, values, n)) return false;
  ++shortcut->fired;
  return true;
}

// One call of an observed callable.
struct HostCall {
  void* arguments;  // a tuple
  void* keywords;   // a dictionary
  void* result;     // NULL: not yet
};

// NULL: the call has no such value.
void* ValueAt(const PythonPlace& place, const HostCall& call) {
  void* value = call.result;
  if (place.argument >= 0) {
    value = place.argument < python->tuple_size(call.arguments) ? python->tuple_item(call.arguments, place.argument)
            : place.name != nullptr                             ? python->dict_item(call.keywords, place.name)
                                                                : nullptr;
  }
  if (value == nullptr || place.member < 0) return value;
  const intptr_t size = python->tuple_size(value);
  if (size < 0) python->clear_error();
  return place.member < size ? python->tuple_item(value, place.member) : nullptr;
}

bool Take(PythonShortcut* shortcut, const HostCall& call) {
  void* values[kMaxParts];
  const uint32_t n = shortcut->n_places;
  if (n > kMaxParts) return false;
  for (uint32_t i = 0; i < n; ++i) {
    if ((values[i] = ValueAt(shortcut->places[i], call)) == nullptr) return false;
  }
  for (uint32_t i = 0; i < shortcut->n_nothing; ++i) {
    if (ValueAt(shortcut->places[n + i], call) != python->none) return false;
  }
  return Take(shortcut, values, n);
}

// Where the callable keeps what its calls with this first argument record; -1: nowhere.
int64_t Find(const PythonCallable& callable, void* arguments) {
  if (python->tuple_size(arguments) < 1) return -1;
  const void* owner = python->tuple_item(arguments, 0);
  const auto* end = callable.owners + callable.n;
  const auto* at = std::lower_bound(callable.owners, end, owner, std::less<>());
  return at != end && *at == owner ? at - callable.owners : -1;
}

bool TakeBefore(const PythonCallable& callable, const HostCall& call) {
  const int64_t at = Find(callable, call.arguments);
  if (at < 0) return false;
  PythonShortcut *before = callable.before[at], *after = callable.after[at];
  if (after != nullptr && !IsOpen(*after)) return false;
  return before == nullptr || Take(before, call);
}

bool TakeAfter(const PythonCallable& callable, const HostCall& call) {
  const int64_t at = Find(callable, call.arguments);
  return at >= 0 && (callable.after[at] == nullptr || Take(callable.after[at], call));
}

}  // namespace

extern "C" {

void assay_python_functions(const PythonFunctions* functions) { python = functions; }

void assay_python_modules(PythonModule* const* table, int64_t n) {
  modules = table;
  n_modules = n;
}

int32_t assay_python_lets_through(const assay_trace* trace, const char* name) {
  const assay::Recorder* recorder =
      trace == nullptr ? nullptr : assay::Recorder::FromControl(const_cast<assay_trace*>(trace));
  return recorder != nullptr && recorder->wants(name, -1, -1) ? 1 : 0;
}

void* assay_python_record(void*, void* const* arguments, intptr_t n_arguments) {
  if (n_arguments != 3 && n_arguments != 4) return Answer(python->no);
  auto* site = At<PythonSite>(arguments[0]);
  if (IsDisarmed(*site)) return Answer(python->yes);
  Tensor tensor;
  if (!Read(arguments[1], &tensor)) return Answer(python->no);
  const bool known = HasToBeAsked(tensor) ? Ask(arguments[1], &tensor) && ReadAgain(arguments[1], &tensor)
                                          : Complete(arguments[1], &tensor);
  if (!known || !Takes(*site, tensor)) return Answer(python->no);
  const PythonRows* rows =
      n_arguments == 3 ? At<const PythonRows>(arguments[2]) : RowsOf(tensor, At<const PythonStep>(arguments[3]));
  const int result = Record(tensor, rows, site);
  return Answer(result == 0 ? python->yes : python->none);
}

void* assay_python_group(void*, void* const* arguments, intptr_t n_arguments) {
  if (n_arguments < 3) return Answer(python->no);
  const auto* group = At<const PythonGroup>(arguments[0]);
  const auto* step = At<const PythonStep>(arguments[1]);
  const PythonNow now{1, step, nullptr};  // the caller holds the step
  return Answer(RecordGroup(*group, now, arguments + 2, n_arguments - 2) ? python->yes : python->no);
}

void* assay_python_before(void*, void* const* arguments, intptr_t n_arguments) {
  if (n_arguments != 3) return Answer(python->no);
  const HostCall call{arguments[1], arguments[2], nullptr};
  return Answer(TakeBefore(*At<const PythonCallable>(arguments[0]), call) ? python->yes : python->no);
}

void* assay_python_after(void*, void* const* arguments, intptr_t n_arguments) {
  if (n_arguments != 4) return Answer(python->no);
  const HostCall call{arguments[1], arguments[2], arguments[3]};
  return Answer(TakeAfter(*At<const PythonCallable>(arguments[0]), call) ? python->yes : python->no);
}

void assay_python_observers(void* known, void* function) {
  shortcuts = known;
  otherwise = function;
}

void* assay_python_observe(void*, void* const* arguments, intptr_t n_arguments) {
  if (n_arguments != 2) return Answer(python->none);  // the operator's kernel alone calls it
  void* known = python->dict_item(shortcuts, arguments[1]);
  const intptr_t n = python->list_size(arguments[0]);
  if (known != nullptr && n > 0 && n <= kMaxParts) {
    void* values[kMaxParts];
    for (intptr_t i = 0; i < n; ++i) values[i] = python->list_item(arguments[0], i);
    if (Take(At<PythonShortcut>(known), values, n)) return Answer(python->none);
  }
  if (n < 0) python->clear_error();
  return python->call(otherwise, arguments[0], arguments[1], nullptr);
}

void* assay_python_leave(void*, void* const* arguments, intptr_t n_arguments) {
  if (n_arguments != 3) return Answer(python->no);
  return Answer(Leave(python->number(arguments[0]), arguments[1], arguments[2]) ? python->yes : python->no);
}

}  // extern "C"
