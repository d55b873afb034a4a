// The settings grammar: one parser for C, the CLI and Python (docs/settings.md).
//   ASSAY=PROFILE[:SINK]      master gate; empty, "0" or "off" is off
//   ASSAY_DIR, ASSAY_LEVEL, ASSAY_INCLUDE, ASSAY_EXCLUDE, ASSAY_LAYERS, ASSAY_RANKS, ASSAY_STEPS, ASSAY_BUDGET,
//   ASSAY_GRIDS, ASSAY_THREADS, ASSAY_SEGMENT, ASSAY_SEED, ASSAY_RING, ASSAY_TOKENS,
//   ASSAY_STRICT
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace assay {

enum class Level : uint8_t { kNames = 0, kShapes = 1, kStats = 2, kSample = 3, kPayload = 4 };

// "0,1,4-6", "3-", "all"; empty: everything.
struct IntervalSet {
  std::vector<std::pair<int64_t, int64_t>> ranges;  // inclusive
  bool contains(int64_t v) const;
};

// Globs (* ? [..]) or /regex/ (POSIX extended), comma-separated, matched against the whole canonical name and the
// engine's name.
struct NameFilter {
  std::vector<std::string> patterns;
  bool matches(std::string_view name) const;
};

struct Settings {
  std::string profile;       // empty: off
  std::string sink;          // "" trace folder, "stderr" a line an event
  std::string dir = "assay-trace-%p";
  Level level = Level::kStats;
  NameFilter include;        // empty: everything
  NameFilter exclude;
  IntervalSet layers, ranks, steps;
  uint64_t byte_cap = uint64_t{4} << 30;
  uint64_t payload_budget = uint64_t{1} << 30;
  bool row_grid = true;
  bool head_grid = true;
  int threads = 1;
  int64_t segment_rows = 64;
  uint64_t seed = 0;         // of sampled rows
  int64_t sample_rows = 8;   // level sample: rows an event
  int64_t ring_steps = 0;    // > 0: on-anomaly, keep the last N steps in memory
  bool tokens = false;       // store token ids (content): RequestInfo::tokens and the payload of next_token
  bool strict = false;       // unknown sites and dropped events are errors at close
  bool on() const { return !profile.empty(); }
};

// lookup(name) gives the value of a variable or nullopt. Errors (kUsage) name the variable, the column and the grammar.
// An unknown ASSAY_* variable is an error in ParseSettings from the environment, with the nearest known name.
Result<Settings> ParseSettings(const std::function<std::optional<std::string>(std::string_view)>& lookup);
Result<Settings> SettingsFromEnvironment();
// Every variable: name, value grammar, default, one line of help; docs/settings.md and --help print it.
struct SettingHelp { std::string_view name, grammar, default_value, help; };
std::vector<SettingHelp> AllSettings();

}  // namespace assay
