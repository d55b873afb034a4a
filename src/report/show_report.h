// `assay show`: what a trace holds, one table a step, as JSON (schema assay.show/1) and as text; then what it does not
// hold: coverage notes, drops, damaged records.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/json.h"
#include "trace/reader.h"

namespace assay {

struct ShowOptions {
  std::vector<std::string> sites;  // globs over the canonical name; empty: all
  std::vector<int64_t> ranks;      // empty: all
  std::vector<int64_t> steps;      // empty: all
  std::vector<uint64_t> requests;  // keys; empty: all
  uint64_t limit = 0;              // events; 0: all
  bool wide = false;               // text: strides, addresses, engine names, digests as well
};

// One event, reduced to the rows that were asked for.
struct ShownEvent {
  Event event;  // without grids and sketches
  std::string site, engine_name, axes;
  Stats stats;                    // of all shown segments together
  std::vector<std::string> rows;  // "request:first-last" a segment run
};

struct ShowModel {
  std::string path;
  std::vector<ShownEvent> events;  // ascending step, then order of recording
  uint64_t matching = 0;           // events that matched; more than events.size() when limited
  uint64_t total = 0;
  std::vector<Damage> payload_damages;  // of the events shown, whose payloads are read and checked
};

// "5 dropped (disk_full 3, internal 2)", without the brackets when there are none.
std::string DropsText(const DropCounts& drops);
// {"byte_cap": 0, "disk_full": 3, ...}, keys of docs/json.md.
Json DropsJson(const DropCounts& drops);

// Reads the payloads of the events shown, so that damage in them is seen. trace must outlive the call only.
ShowModel MakeShowModel(const Trace& trace, const ShowOptions& options);
Json ShowJson(const Trace& trace, const ShowModel& model);
std::string ShowText(const Trace& trace, const ShowModel& model, bool wide);

}  // namespace assay
