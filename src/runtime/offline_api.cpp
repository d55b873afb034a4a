// The functions of assay_offline.h over the reader and the comparison. Nothing thrown leaves this file.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "assay/assay_offline.h"
#include "compare/diff.h"
#include "report/diff_report.h"
#include "runtime/c_error.h"
#include "runtime/offline_json.h"
#include "trace/arrow_stream.h"
#include "trace/reader.h"

// Shared: an exported Arrow stream keeps the trace open after the reader is closed.
struct assay_reader {
  std::shared_ptr<const assay::Trace> trace;
};

namespace {

using assay::RunForC;
using assay::SetError;
using assay::Status;

// malloc, as assay_string_free frees it: the caller's C library need not know this one's operator delete.
Status HandOut(const std::string& text, char** out) {
  *out = static_cast<char*>(std::malloc(text.size() + 1));
  if (*out == nullptr) return Status::Environment("no memory");
  std::memcpy(*out, text.c_str(), text.size() + 1);
  return {};
}

// Event numbers come from the caller; Trace::event trusts them.
Status CheckNumber(const assay_reader* reader, uint64_t number) {
  if (number < reader->trace->event_count()) return {};
  return Status::Usage("event " + std::to_string(number) + " of a trace with " +
                       std::to_string(reader->trace->event_count()) + " events");
}

}  // namespace

extern "C" {

int assay_reader_open(const char* path, assay_reader** reader, assay_error* error) {
  if (path == nullptr || reader == nullptr) return SetError(error, ASSAY_ERROR_USAGE, "path or reader is NULL");
  *reader = nullptr;
  return RunForC(error, [&]() -> Status {
    ASSAY_ASSIGN_OR_RETURN(std::unique_ptr<assay::Trace> trace, assay::Trace::Open(path));
    *reader = new assay_reader{std::move(trace)};
    return {};
  });
}

void assay_reader_close(assay_reader* reader) { delete reader; }

uint64_t assay_reader_count(const assay_reader* reader) { return reader == nullptr ? 0 : reader->trace->event_count(); }

int assay_reader_describe(const assay_reader* reader, char** json, assay_error* error) {
  if (reader == nullptr || json == nullptr) return SetError(error, ASSAY_ERROR_USAGE, "reader or json is NULL");
  *json = nullptr;
  return RunForC(error, [&] { return HandOut(assay::DescribeTrace(*reader->trace), json); });
}

int assay_reader_event(const assay_reader* reader, uint64_t number, char** json, assay_error* error) {
  if (reader == nullptr || json == nullptr) return SetError(error, ASSAY_ERROR_USAGE, "reader or json is NULL");
  *json = nullptr;
  return RunForC(error, [&]() -> Status {
    ASSAY_RETURN_IF_ERROR(CheckNumber(reader, number));
    return HandOut(assay::DescribeEvent(*reader->trace, reader->trace->event(number)), json);
  });
}

int assay_reader_payload(const assay_reader* reader, uint64_t number, const void** data, uint64_t* size_bytes,
                         assay_error* error) {
  if (reader == nullptr || data == nullptr || size_bytes == nullptr) {
    return SetError(error, ASSAY_ERROR_USAGE, "reader, data or size_bytes is NULL");
  }
  *data = nullptr;
  *size_bytes = 0;
  return RunForC(error, [&]() -> Status {
    ASSAY_RETURN_IF_ERROR(CheckNumber(reader, number));
    const assay::Event event = reader->trace->event(number).Decode();
    if (event.payload.sha256.empty()) return {};
    ASSAY_ASSIGN_OR_RETURN(const std::span<const std::byte> bytes, reader->trace->payload(event.payload));
    *data = bytes.data();
    *size_bytes = bytes.size();
    return {};
  });
}

int assay_reader_stream(const assay_reader* reader, struct ArrowArrayStream* stream, assay_error* error) {
  if (reader == nullptr || stream == nullptr) return SetError(error, ASSAY_ERROR_USAGE, "reader or stream is NULL");
  return RunForC(error, [&]() -> Status {
    assay::ExportEvents(reader->trace, {}, stream);
    return {};
  });
}

// exit_code stays at "internal" unless a result was made.
int assay_diff_traces(const assay_reader* a, const assay_reader* b, const char* tolerance, const char* floor_path,
                      int32_t threads, char** json, int32_t* exit_code, assay_error* error) {
  if (a == nullptr || b == nullptr || json == nullptr || exit_code == nullptr) {
    return SetError(error, ASSAY_ERROR_USAGE, "a, b, json or exit_code is NULL");
  }
  *json = nullptr;
  *exit_code = ASSAY_ERROR_INTERNAL;
  return RunForC(error, [&]() -> Status {
    assay::DiffOptions options;
    if (tolerance != nullptr) options.tolerance = tolerance;
    if (floor_path != nullptr) options.floor_trace = floor_path;
    options.threads = threads;
    ASSAY_ASSIGN_OR_RETURN(const assay::DiffResult result, assay::Diff(*a->trace, *b->trace, options));
    *exit_code = result.verdict == assay::Verdict::kFault ? 1 : result.verdict == assay::Verdict::kIncomparable ? 3 : 0;
    return HandOut(assay::WriteJson(assay::DiffJson(result, a->trace->path(), b->trace->path())), json);
  });
}

void assay_string_free(char* text) { std::free(text); }

}  // extern "C"
