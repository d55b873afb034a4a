// One trace file as an index over its bytes: what it says about its process, and where its events lie.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "trace/reader.h"

namespace assay {

// What opening a file yields, before files are joined to a Trace.
struct TraceFileIndex {
  TraceProcess process;
  std::vector<Damage> damages;
  std::vector<uint64_t> events;   // offsets of checked event records, ascending; 8 bytes an event
  uint64_t event_count_hint = 0;  // of the live counters: events given space
};

// first_nonzero(from): first offset >= from whose byte is not zero, or the size; called for the tail behind the
// writer's own mark, which must not be touched through a mapping while a writer may still cut it off.
using FirstNonZero = std::function<uint64_t(uint64_t from)>;

// kBadInput: no trace file, or one that needs a newer reader. Anything behind the header is reported as damage instead.
// What was readable of the process stands in *index even then.
Status IndexTraceFile(std::span<const unsigned char> bytes, const std::string& name, const FirstNonZero& first_nonzero,
                      TraceFileIndex* index);

// Everything but the events and their damage, by the chain of the non-event records: independent of the file's size.
Status ReadTraceFileSummary(std::span<const unsigned char> bytes, const std::string& name, TraceFileIndex* index);

// True when the error of IndexTraceFile means "written by a newer major version" (the whole trace is then refused).
// False for a header that is damaged: its version is then not to be believed.
bool NeedsNewerReader(std::span<const unsigned char> bytes);

}  // namespace assay
