// The functions of assay.h over the Recorder. Nothing thrown leaves this file: every entry point catches.
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "assay/assay.h"
#include "base/version.h"
#include "probe/recorder.h"
#include "probe/settings.h"
#include "runtime/c_error.h"
#include "runtime/event_fields.h"
#include "runtime/process_info.h"
#include "trace/request_key.h"

namespace {

using namespace assay;  // NOLINT: this file is the seam between the two name spaces

// Version 1 of the structs: a change of these sizes is a new field at the end, and a new least size in ReadStruct.
static_assert(sizeof(assay_options) == 72 && sizeof(assay_site_info) == 32 && sizeof(assay_request) == 48);
static_assert(sizeof(assay_event) == 216 && sizeof(assay_row_run) == 40 && sizeof(assay_drop_counts) == 48);
static_assert(ASSAY_DTYPE_BF16 == static_cast<int>(DType::kBF16) &&
              ASSAY_DTYPE_BOOL == static_cast<int>(DType::kBool) &&
              ASSAY_DTYPE_F4_E2M1 == static_cast<int>(DType::kF4E2M1) &&
              ASSAY_DTYPE_I64 == static_cast<int>(DType::kI64));
static_assert(ASSAY_PHASE_LOAD == static_cast<int>(Phase::kLoad) && ASSAY_FLAG_IN_GRAPH == kEventInGraph);

// A handle points at the armed flag, which assay_armed reads without a call: the first word of the recorder's control
// page (probe/control.h), or of this, which assay_open hands out when nothing is recorded; never armed, never freed.
struct alignas(8) OffHandle {
  void* owner = nullptr;  // where a control page has its owner
  int32_t armed = 0;
};
static_assert(offsetof(OffHandle, armed) == sizeof(void*));

// One for all traces that are off: it is only read.
assay_trace* OffTrace() {
  static OffHandle off;
  return reinterpret_cast<assay_trace*>(&off.armed);
}

// NULL for a trace that records nothing; REQUIRES a handle of assay_open, or NULL.
Recorder* RecorderOf(const assay_trace* trace) {
  return trace == nullptr ? nullptr : Recorder::FromControl(const_cast<assay_trace*>(trace));
}

bool IsOff(const assay_trace* trace) { return RecorderOf(trace) == nullptr; }

// Assignments win over the environment, which NO_ENVIRONMENT leaves out altogether.
Result<Settings> ReadSettings(const char* const* settings, uint64_t n_settings, uint32_t flags) {
  if ((flags & ~ASSAY_OPEN_NO_ENVIRONMENT) != 0) return Status::Usage("unknown flag " + std::to_string(flags));
  if (n_settings != 0 && settings == nullptr) return Status::Usage("settings is NULL with n_settings above 0");
  std::vector<std::string> assignments;
  for (uint64_t i = 0; i < n_settings; ++i) {
    if (settings[i] == nullptr) return Status::Usage("settings[" + std::to_string(i) + "] is NULL");
    assignments.emplace_back(settings[i]);
  }
  return ParseSettings(assignments, (flags & ASSAY_OPEN_NO_ENVIRONMENT) == 0);
}

// Leaves *trace as it is (off) when nothing is to be recorded.
Status Open(const assay_options* given, assay_trace** trace) {
  assay_options options = assay_options_init();
  if (given != nullptr) ASSAY_RETURN_IF_ERROR(ReadStruct(given, "assay_options", &options));
  ASSAY_ASSIGN_OR_RETURN(const Settings settings, ReadSettings(options.settings, options.n_settings, options.flags));
  if (!settings.on()) return {};
  ProcessInfo process = DescribeThisProcess();
  if (options.rank >= 0) process.rank = options.rank;
  if (options.world_size > 0) process.world_size = options.world_size;
  if (options.command != nullptr) {
    process.command.clear();
    for (uint64_t i = 0; i < options.n_command; ++i) {
      if (options.command[i] == nullptr) {
        return Status::Usage("assay_options.command[" + std::to_string(i) + "] is NULL");
      }
      process.command.emplace_back(options.command[i]);
    }
  }
  process.meta.emplace_back("assay", ASSAY_VERSION);
  for (auto& [name, value] : FormatSettings(settings)) process.meta.emplace_back(name, value);
  if (options.n_meta != 0 && options.meta == nullptr) return Status::Usage("assay_options.meta is NULL");
  for (uint64_t i = 0; i < options.n_meta; ++i) {
    const assay_pair& pair = options.meta[i];
    if (pair.key == nullptr || pair.value == nullptr) {
      return Status::Usage("assay_options.meta[" + std::to_string(i) + "] has a NULL key or value");
    }
    process.meta.emplace_back(pair.key, pair.value);
  }
  ASSAY_ASSIGN_OR_RETURN(std::unique_ptr<Recorder> opened, Recorder::Open(settings, process));
  *trace = static_cast<assay_trace*>(opened.release()->control());
  return {};
}

// Everything that can be wrong with an event before the recorder sees it.
Status ReadObservation(assay_trace* trace, const assay_event* given, OwnedObservation* owned) {
  assay_event event = assay_event_init();
  ASSAY_RETURN_IF_ERROR(ReadStruct(given, "assay_event", &event));
  if (event.site >= 0) {
    if (event.site <= UINT32_MAX) {
      owned->observation.handle = RecorderOf(trace)->SiteAt(static_cast<uint32_t>(event.site));
    }
    if (owned->observation.handle == nullptr) {
      return Status::Usage("assay_event.site is " + std::to_string(event.site) + ", which assay_add_site never gave");
    }
  }
  return ReadEvent(event, owned);
}

// What could not even be read is counted too, under its site when that is known: a host that ignores return codes
// still finds the loss in the coverage.
Status Record(assay_trace* trace, const assay_event* given) {
  OwnedObservation owned;
  const Status read = ReadObservation(trace, given, &owned);
  if (!read.ok()) {
    RecorderOf(trace)->CountLost(owned.observation, read.message());
    return read;
  }
  return RecorderOf(trace)->Record(owned.observation);
}

}  // namespace

extern "C" {

const char* assay_version(void) { return ASSAY_VERSION; }
uint32_t assay_abi_version(void) { return ASSAY_ABI_VERSION; }

// A failed open leaves the handle off, so that a host that ignores the error records nothing and does not crash.
int assay_open(const assay_options* options, assay_trace** trace, assay_error* error) {
  if (trace == nullptr) return SetError(error, ASSAY_ERROR_USAGE, "trace is NULL");
  *trace = OffTrace();
  return RunForC(error, [&] { return Open(options, trace); });
}

// The handle is gone whatever happens: closing twice must not be possible by accident.
int assay_close(assay_trace** trace, assay_error* error) {
  if (trace == nullptr) return SetError(error, Status());
  const std::unique_ptr<Recorder> owned(RecorderOf(*trace));
  *trace = nullptr;
  if (owned == nullptr) return SetError(error, Status());
  owned->arm(false);
  return RunForC(error, [&] { return owned->Close(); });
}

int assay_arm(assay_trace* trace, int32_t on, assay_error* error) {
  if (IsOff(trace)) {
    return SetError(error, ASSAY_ERROR_USAGE, "nothing to arm: ASSAY is off; set it before assay_open");
  }
  RecorderOf(trace)->arm(on != 0);
  return SetError(error, Status());
}

// Number 0 while off: it is never looked up.
int assay_add_site(assay_trace* trace, const assay_site_info* info, uint32_t* site, assay_error* error) {
  if (site != nullptr) *site = 0;
  if (IsOff(trace)) return SetError(error, Status());
  return RunForC(error, [&]() -> Status {
    assay_site_info read = assay_site_info_init();
    ASSAY_RETURN_IF_ERROR(ReadStruct(info, "assay_site_info", &read));
    if (read.name == nullptr || *read.name == '\0') return Status::Usage("assay_site_info.name is empty");
    const ProbeSite* added = RecorderOf(trace)->AddSite(read.name, read.engine_name == nullptr ? "" : read.engine_name,
                                                        read.axes == nullptr ? "" : read.axes);
    if (added == nullptr) return Status::Environment("no memory");
    if (site != nullptr) *site = Recorder::NumberOf(added);
    return {};
  });
}

// A disarmed trace costs one load here: the handle points at the flag.
int assay_wants(assay_trace* trace, uint32_t site, int32_t rank, int64_t step) {
  if (IsOff(trace) || assay_armed(trace) == 0) return 0;
  return RecorderOf(trace)->wants(RecorderOf(trace)->SiteAt(site), rank, step) ? 1 : 0;
}

int assay_wants_name(assay_trace* trace, const char* name, int32_t rank, int64_t step) {
  if (IsOff(trace) || assay_armed(trace) == 0 || name == nullptr) return 0;
  return RecorderOf(trace)->wants(name, rank, step) ? 1 : 0;
}

// Off or disarmed: two loads and no look at the event.
int assay_record(assay_trace* trace, const assay_event* event, assay_error* error) {
  if (IsOff(trace) || assay_armed(trace) == 0) return SetError(error, Status());
  return RunForC(error, [&] { return Record(trace, event); });
}

// NULL tokens are no tokens: nothing to report an error with, and the key of an empty prompt is defined.
uint64_t assay_request_key(const int64_t* tokens, uint64_t n_tokens, int64_t ordinal) {
  return RequestKey({tokens, tokens == nullptr ? 0 : static_cast<size_t>(n_tokens)}, ordinal);
}

// The key is computed even when nothing is recorded: hosts use it as an identity.
int assay_add_request(assay_trace* trace, const assay_request* request, uint64_t* key, assay_error* error) {
  return RunForC(error, [&]() -> Status {
    assay_request read = assay_request_init();
    ASSAY_RETURN_IF_ERROR(ReadStruct(request, "assay_request", &read));
    if (read.n_tokens != 0 && read.tokens == nullptr) return Status::Usage("assay_request.tokens is NULL");
    RequestInfo info;
    info.key = read.key != 0 ? read.key : assay_request_key(read.tokens, read.n_tokens, read.ordinal);
    if (key != nullptr) *key = info.key;
    if (IsOff(trace)) return {};
    info.ordinal = read.ordinal;
    info.tokens.assign(read.tokens, read.tokens + read.n_tokens);
    if (read.engine_id != nullptr) info.engine_id = read.engine_id;
    return RecorderOf(trace)->AddRequest(info);
  });
}

int assay_coverage(assay_trace* trace, const char* site, const char* reason, uint64_t count, const char* detail,
                   assay_error* error) {
  if (IsOff(trace)) return SetError(error, Status());
  return RunForC(error, [&]() -> Status {
    if (site == nullptr || reason == nullptr) return Status::Usage("site or reason is NULL");
    return RecorderOf(trace)->AddCoverage({site, reason, count, detail == nullptr ? "" : detail});
  });
}

int assay_set_meta(assay_trace* trace, const char* key, const char* value, assay_error* error) {
  if (IsOff(trace)) return SetError(error, Status());
  return RunForC(error, [&]() -> Status {
    if (key == nullptr || value == nullptr) return Status::Usage("key or value is NULL");
    return RecorderOf(trace)->AddMeta(key, value);
  });
}

int assay_trigger(assay_trace* trace, const char* reason, assay_error* error) {
  if (IsOff(trace)) return SetError(error, Status());
  return RunForC(error, [&] { return RecorderOf(trace)->Trigger(reason == nullptr ? "" : reason); });
}

int assay_flush(assay_trace* trace, assay_error* error) {
  if (IsOff(trace)) return SetError(error, Status());
  return RunForC(error, [&] { return RecorderOf(trace)->Flush(); });
}

// Writes as much of the struct as the caller's version has.
int assay_drops(const assay_trace* trace, assay_drop_counts* counts, assay_error* error) {
  return RunForC(error, [&]() -> Status {
    assay_drop_counts now = assay_drop_counts_init();
    ASSAY_RETURN_IF_ERROR(ReadStruct(counts, "assay_drop_counts", &now));
    const uint64_t size = now.struct_size;
    now = assay_drop_counts_init();
    if (!IsOff(trace)) {
      const DropCounts drops = RecorderOf(trace)->drops();
      now.byte_cap = drops.byte_cap;
      now.disk_full = drops.disk_full;
      now.payload_budget = drops.payload_budget;
      now.internal = drops.internal;
      now.recorded = RecorderOf(trace)->recorded();
    }
    now.struct_size = size;
    std::memcpy(counts, &now, sizeof(now) < size ? sizeof(now) : static_cast<size_t>(size));
    return {};
  });
}

const char* assay_dir(const assay_trace* trace) { return IsOff(trace) ? "" : RecorderOf(trace)->dir().c_str(); }
const char* assay_path(const assay_trace* trace) { return IsOff(trace) ? "" : RecorderOf(trace)->path().c_str(); }

// *size in: room; out: bytes needed with the final zero. A buffer that is too small is left alone, so asking twice
// works.
int assay_settings_text(const char* const* settings, uint64_t n_settings, uint32_t flags, char* buffer, uint64_t* size,
                        assay_error* error) {
  return RunForC(error, [&]() -> Status {
    if (size == nullptr) return Status::Usage("size is NULL");
    ASSAY_ASSIGN_OR_RETURN(const Settings parsed, ReadSettings(settings, n_settings, flags));
    std::string text;
    for (const auto& [name, value] : FormatSettings(parsed)) text += name + "=" + value + "\n";
    const uint64_t needed = text.size() + 1;
    if (buffer != nullptr && *size >= needed) std::memcpy(buffer, text.c_str(), needed);
    *size = needed;
    return {};
  });
}

const char* assay_dtype_name(uint32_t dtype) {
  if (dtype > UINT8_MAX || BitsOf(static_cast<DType>(dtype)) == 0) return nullptr;
  return NameOf(static_cast<DType>(dtype)).data();  // names are literals
}

}  // extern "C"
