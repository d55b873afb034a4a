// The settings grammar: one parser for C, the CLI and Python (docs/settings.md).
//   ASSAY=PROFILE[:SINK]      master gate; empty, "0" or "off" is off
//   ASSAY_DIR, ASSAY_LEVEL, ASSAY_INCLUDE, ASSAY_EXCLUDE, ASSAY_LAYERS, ASSAY_RANKS, ASSAY_STEPS, ASSAY_BUDGET,
//   ASSAY_GRIDS, ASSAY_THREADS, ASSAY_SEGMENT, ASSAY_SEED, ASSAY_RING, ASSAY_TOKENS, ASSAY_PROBES, ASSAY_ATTACH,
//   ASSAY_ARMED, ASSAY_STRICT
// The parser reads text and nothing else: it opens no file, and a pattern that matches no site is not an error here
// (the recorder notes it at close). It runs inside host processes: no iostreams, no std::regex, no locale.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace assay {

// How much of each tensor is kept. Each level holds all that the levels before it hold.
enum class Level : uint8_t {
  kNames = 0,    // that the site fired: name, rank, step, phase
  kShapes = 1,   // and dtype, shape, strides, offset, stream
  kStats = 2,    // and statistics, sketch, digest, grids; the tensor's memory is read from here on
  kSample = 3,   // and sample_rows rows of it
  kPayload = 4,  // and all of it
};
std::string_view NameOf(Level level);

// "0,1,4-6", "3-" (3 and all above), "all"; no range at all: everything. Bounds are inclusive, from 0.
struct IntervalSet {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  bool contains(int64_t v) const;
};

// Globs (* ? [a-z] [!x]; * crosses dots) match the whole name; /regex/ (POSIX extended) matches anywhere in it.
// Comma-separated. Names are canonical ("layers.3.attn.q") or the engine's own.
struct NameFilter {
  std::vector<std::string> patterns;
  // Whether any pattern matches; false without patterns. A regex is compiled at each call: callers keep the answer.
  bool matches(std::string_view name) const;
};
// One pattern of a NameFilter. An invalid regex matches nothing (the parser has refused it before).
bool PatternMatches(std::string_view pattern, std::string_view name);

struct Settings {
  std::string profile;                          // a name of AllProfiles() or a host's own; empty: off
  std::string sink;                             // "" trace folder, "stderr" a line an event
  std::string dir = "assay-trace-%p";           // %r rank, %p pid, %h host, %i next free number
  Level level = Level::kStats;                  // how much of a tensor is kept
  NameFilter include;                           // empty: everything
  NameFilter exclude;                           // wins over include
  IntervalSet layers, ranks, steps;             // sites without a layer pass layers; events without a step pass steps
  uint64_t byte_cap = uint64_t{4} << 30;        // event bytes a process
  uint64_t payload_budget = uint64_t{1} << 30;  // payload bytes a process
  bool row_grid = true;                         // a cell a row: norm, digest, 4 buckets
  bool head_grid = true;                        // a cell a head: norm, 16 buckets
  int threads = 1;                              // of one statistics pass
  int64_t segment_rows = 64;                    // positions a segment
  uint64_t seed = 0;                            // of sampled rows
  int64_t sample_rows = 8;                      // level sample: rows an event
  int64_t ring_steps = 0;                       // > 0: on-anomaly, keep the last N steps in memory
  bool tokens = false;         // store token ids (content): RequestInfo::tokens and next_token's payload
  std::string probes;          // selectors of a Python host, checked, as given; read by assay.attach
  std::string attach = "all";  // profiles of a Python host: names joined by commas, "all" or "none"
  bool armed = true;           // at the start; false: nothing is recorded until somebody arms
  bool strict = false;         // patterns not found and dropped events are errors at close
  bool on() const { return !profile.empty(); }
};

// lookup(name) gives the value of a variable or nullopt; it is asked for the names of AllSettings() alone. Errors
// (kUsage) name the variable, the column (from 1), what was found and what is expected.
Result<Settings> ParseSettings(const std::function<std::optional<std::string>(std::string_view)>& lookup);

// assignments: "ASSAY_LEVEL=payload", later ones win. over_environment: what they do not set comes from the process's
// environment. kUsage also for an unknown ASSAY_* name, in the list or in the environment, with the nearest known one,
// and for an ASSAY_ISA in the environment that this machine does not have.
Result<Settings> ParseSettings(std::span<const std::string> assignments, bool over_environment);
Result<Settings> SettingsFromEnvironment();

// The settings as variables that parse to the same settings, in the order of AllSettings(); empty values left out.
std::vector<std::pair<std::string, std::string>> FormatSettings(const Settings& settings);

// Every variable: name, value grammar, default, one line of help; docs/settings.md and --help print it.
struct SettingHelp {
  std::string_view name, grammar, default_value, help;
};
std::span<const SettingHelp> AllSettings();

// Presets of ASSAY_INCLUDE, by the name that ASSAY= takes. include is in the grammar of ASSAY_INCLUDE, empty: all.
struct ProfileHelp {
  std::string_view name, include, help;
};
std::span<const ProfileHelp> AllProfiles();

// "64MiB", "1.5GB" is refused (whole numbers only), "4096". Units KiB MiB GiB TiB (1024) and KB MB GB TB (1000), B.
Result<uint64_t> ParseSize(std::string_view variable, std::string_view text);
// The name of `known` with the smallest edit distance to `name`; empty when none is closer than half of its length.
std::string_view NearestName(std::string_view name, std::span<const std::string_view> known);

}  // namespace assay
