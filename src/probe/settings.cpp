#include "probe/settings.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <climits>
#include <limits>

#include "probe/settings_reader.h"
#include "stats/measure.h"

extern char** environ;

namespace assay {
namespace {

using settings_reader::Cursor;
using settings_reader::ReadAttach;
using settings_reader::ReadPatterns;
using settings_reader::ReadProbes;

// Read by other parts of assay, from the environment alone: known names, not settings of a recording.
constexpr std::string_view kOtherNames[] = {"ASSAY_ISA", "ASSAY_LIBRARY", "ASSAY_TEST_STAGES"};

// Stands for "and all above" in an interval without an end.
constexpr int64_t kMaxInterval = std::numeric_limits<int64_t>::max();

// ASCII alone: the host's locale must not change what a setting means.
std::string Lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

// A size ends at a comma or at the end, so that it can stand in a list (ASSAY_BUDGET). Units in any case.
Result<uint64_t> ReadSize(Cursor* cursor) {
  constexpr std::string_view kWhat = "a size such as 64MiB, 2GB or 4096";
  const size_t start = cursor->at;
  ASSAY_ASSIGN_OR_RETURN(const uint64_t count, cursor->Number(kWhat));
  const size_t unit_at = cursor->at;
  while (!cursor->done() && cursor->peek() != ',') ++cursor->at;
  const std::string unit = Lower(cursor->text.substr(unit_at, cursor->at - unit_at));
  struct Unit {
    std::string_view name;
    uint64_t bytes;
  };
  constexpr Unit kUnits[] = {{"", 1},
                             {"b", 1},
                             {"kib", uint64_t{1} << 10},
                             {"mib", uint64_t{1} << 20},
                             {"gib", uint64_t{1} << 30},
                             {"tib", uint64_t{1} << 40},
                             {"kb", 1000},
                             {"mb", 1000000},
                             {"gb", 1000000000},
                             {"tb", 1000000000000}};
  for (const Unit& u : kUnits) {
    if (unit != u.name) continue;
    if (count > UINT64_MAX / u.bytes) return cursor->Expected("a size below 2^64 bytes", start);
    return count * u.bytes;
  }
  return cursor->Expected("one of the units B KiB MiB GiB TiB KB MB GB TB", unit_at);
}

// Intervals may overlap and stand in any order; contains() asks them one by one.
Result<IntervalSet> ReadIntervals(std::string_view variable, std::string_view text) {
  IntervalSet set;
  if (text == "all") return set;
  Cursor cursor{variable, text};
  do {
    const size_t start = cursor.at;
    ASSAY_ASSIGN_OR_RETURN(const uint64_t low, cursor.Number("intervals such as 0,1,4-6 or 3-, or all"));
    if (low > static_cast<uint64_t>(kMaxInterval)) return cursor.Expected("a number below 2^63", start);
    uint64_t high = low;
    if (cursor.take('-')) {
      high = static_cast<uint64_t>(kMaxInterval);
      if (!cursor.done() && cursor.peek() != ',') {
        const size_t high_at = cursor.at;
        ASSAY_ASSIGN_OR_RETURN(high, cursor.Number("the end of the interval, or nothing"));
        if (high > static_cast<uint64_t>(kMaxInterval)) return cursor.Expected("a number below 2^63", high_at);
        if (high < low) return cursor.Expected("an end that is not below " + std::to_string(low), high_at);
      }
    }
    set.ranges.emplace_back(static_cast<int64_t>(low), static_cast<int64_t>(high));
  } while (cursor.take(','));
  if (!cursor.done()) return cursor.Expected("',' or '-'");
  return set;
}

// A number from low to high, both below 2^63 and not negative.
Result<int64_t> ReadCount(std::string_view variable, std::string_view text, int64_t low, int64_t high) {
  Cursor cursor{variable, text};
  const std::string what = "a whole number from " + std::to_string(low) + " to " + std::to_string(high);
  ASSAY_ASSIGN_OR_RETURN(const uint64_t value, cursor.Number(what));
  if (!cursor.done()) return cursor.Expected("nothing behind the number");
  if (value > static_cast<uint64_t>(high) || value < static_cast<uint64_t>(low)) return cursor.Expected(what, 0);
  return static_cast<int64_t>(value);
}

// "on", "1", "off", "0"; an empty value never comes here, as it means not set.
Result<bool> ReadSwitch(std::string_view variable, std::string_view text) {
  if (text == "on" || text == "1") return true;
  if (text == "off" || text == "0") return false;
  return Cursor{variable, text}.Expected("on or off");
}

std::string JoinNames(std::span<const std::string_view> names) {
  std::string out;
  for (std::string_view name : names) {
    if (!out.empty()) out += ", ";
    out += name;
  }
  return out;
}

// Column of an error in a profile's own include list cannot occur: the table's patterns are tested.
Status ReadGate(std::string_view variable, std::string_view text, Settings* s) {
  if (text.empty() || text == "0" || text == "off") return {};
  const size_t colon = text.find(':');
  std::string_view profile = text.substr(0, colon);
  if (profile == "1" || profile == "on") profile = "all";
  std::vector<std::string_view> names;
  for (const ProfileHelp& help : AllProfiles()) names.push_back(help.name);
  const Cursor cursor{variable, text};
  const auto known = std::find(names.begin(), names.end(), profile);
  if (known == names.end()) {
    const Status refused = cursor.Expected("a profile (" + JoinNames(names) + ") or off", 0);
    const std::string_view nearest = NearestName(profile, names);
    if (nearest.empty()) return refused;
    return Status::Usage(refused.message() + "; did you mean " + std::string(nearest) + "?");
  }
  s->profile = profile;
  const std::string_view include = AllProfiles()[static_cast<size_t>(known - names.begin())].include;
  if (!include.empty()) {
    ASSAY_ASSIGN_OR_RETURN(s->include, ReadPatterns(variable, include));
  }
  if (colon != std::string_view::npos) {
    s->sink = text.substr(colon + 1);
    if (s->sink != "stderr") return cursor.Expected("the sink stderr behind ':'", colon + 1);
  }
  return {};
}

// Only checks the %: the writer expands them, as rank and host are not known here.
Status ReadDir(std::string_view variable, std::string_view text, Settings* s) {
  const Cursor cursor{variable, text};
  if (text.empty()) return cursor.Expected("a path");
  if (text.find('\0') != std::string_view::npos) return cursor.Expected("a path without NUL", text.find('\0'));
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') continue;
    if (i + 1 >= text.size() || std::string_view("rphi%").find(text[i + 1]) == std::string_view::npos) {
      return cursor.Expected("%r, %p, %h, %i or %%", i);
    }
    ++i;
  }
  s->dir = text;
  return {};
}

// "sample:16" sets the level and the number of rows; without a number the default stays.
Status ReadLevel(std::string_view variable, std::string_view text, Settings* s) {
  const size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  for (Level level : {Level::kNames, Level::kShapes, Level::kStats, Level::kSample, Level::kPayload}) {
    if (name != NameOf(level)) continue;
    s->level = level;
    if (colon == std::string_view::npos) return {};
    Cursor cursor{variable, text, colon};
    if (level != Level::kSample) return cursor.Expected("the end (only sample takes a number of rows)");
    ++cursor.at;
    const size_t rows_at = cursor.at;
    constexpr std::string_view kWhat = "a number of rows from 1 to 1000000";
    ASSAY_ASSIGN_OR_RETURN(const uint64_t rows, cursor.Number(kWhat));
    if (rows < 1 || rows > 1000000) return cursor.Expected(kWhat, rows_at);
    if (!cursor.done()) return cursor.Expected("the end");
    s->sample_rows = static_cast<int64_t>(rows);
    return {};
  }
  return Cursor{variable, text}.Expected("names, shapes, stats, sample[:ROWS] or payload");
}

// One size sets both caps; a part that is not named keeps its default.
Status ReadBudget(std::string_view variable, std::string_view text, Settings* s) {
  Cursor cursor{variable, text};
  if (text.find('=') == std::string_view::npos) {
    ASSAY_ASSIGN_OR_RETURN(const uint64_t size, ReadSize(&cursor));
    if (!cursor.done()) return cursor.Expected("one size, or events=SIZE,payload=SIZE");
    s->byte_cap = s->payload_budget = size;
    return {};
  }
  do {
    const size_t start = cursor.at;
    const size_t equals = text.find('=', start);
    const std::string_view key = text.substr(start, equals == std::string_view::npos ? 0 : equals - start);
    if (key != "events" && key != "payload") return cursor.Expected("events=SIZE or payload=SIZE", start);
    cursor.at = equals + 1;
    ASSAY_ASSIGN_OR_RETURN(const uint64_t size, ReadSize(&cursor));
    (key == "events" ? s->byte_cap : s->payload_budget) = size;
  } while (cursor.take(','));
  return {};
}

// What is not named is off: the list replaces the default.
Status ReadGrids(std::string_view variable, std::string_view text, Settings* s) {
  s->row_grid = s->head_grid = false;
  if (text == "none") return {};
  Cursor cursor{variable, text};
  do {
    const size_t start = cursor.at;
    while (!cursor.done() && cursor.peek() != ',') ++cursor.at;
    const std::string_view name = text.substr(start, cursor.at - start);
    if (name == "rows") {
      s->row_grid = true;
    } else if (name == "heads") {
      s->head_grid = true;
    } else {
      return cursor.Expected("rows, heads, rows,heads or none", start);
    }
  } while (cursor.take(','));
  return {};
}

// One variable. An empty value of any of them is the same as the variable being absent.
Status ReadOne(std::string_view name, std::string_view text, Settings* s) {
  if (name == "ASSAY") return ReadGate(name, text, s);
  if (text.empty()) return {};
  if (name == "ASSAY_DIR") return ReadDir(name, text, s);
  if (name == "ASSAY_LEVEL") return ReadLevel(name, text, s);
  if (name == "ASSAY_BUDGET") return ReadBudget(name, text, s);
  if (name == "ASSAY_PROBES") return ReadProbes(name, text, s);
  if (name == "ASSAY_ATTACH") return ReadAttach(name, text, s);
  if (name == "ASSAY_GRIDS") return ReadGrids(name, text, s);
  if (name == "ASSAY_INCLUDE" || name == "ASSAY_EXCLUDE") {
    ASSAY_ASSIGN_OR_RETURN((name == "ASSAY_INCLUDE" ? s->include : s->exclude), ReadPatterns(name, text));
  } else if (name == "ASSAY_LAYERS" || name == "ASSAY_RANKS" || name == "ASSAY_STEPS") {
    IntervalSet& set = name == "ASSAY_LAYERS" ? s->layers : name == "ASSAY_RANKS" ? s->ranks : s->steps;
    ASSAY_ASSIGN_OR_RETURN(set, ReadIntervals(name, text));
  } else if (name == "ASSAY_THREADS") {
    ASSAY_ASSIGN_OR_RETURN(const int64_t threads, ReadCount(name, text, 1, 256));
    s->threads = static_cast<int>(threads);
  } else if (name == "ASSAY_SEGMENT") {
    ASSAY_ASSIGN_OR_RETURN(s->segment_rows, ReadCount(name, text, 1, 65536));
  } else if (name == "ASSAY_RING") {
    ASSAY_ASSIGN_OR_RETURN(s->ring_steps, ReadCount(name, text, 0, 1000000));
  } else if (name == "ASSAY_TOKENS") {
    ASSAY_ASSIGN_OR_RETURN(s->tokens, ReadSwitch(name, text));
  } else if (name == "ASSAY_ARMED") {
    ASSAY_ASSIGN_OR_RETURN(s->armed, ReadSwitch(name, text));
  } else if (name == "ASSAY_STRICT") {
    ASSAY_ASSIGN_OR_RETURN(s->strict, ReadSwitch(name, text));
  } else if (name == "ASSAY_SEED") {
    Cursor cursor{name, text};
    ASSAY_ASSIGN_OR_RETURN(s->seed, cursor.Number("a whole number below 2^64"));
    if (!cursor.done()) return cursor.Expected("nothing behind the number");
  }
  return {};
}

// Known to AllSettings(): may be given as an assignment too.
bool IsSetting(std::string_view name) {
  const auto settings = AllSettings();
  return std::any_of(settings.begin(), settings.end(), [&](const SettingHelp& h) { return h.name == name; });
}

// A slip in a name would otherwise do nothing, silently.
Status CheckName(std::string_view name) {
  if (IsSetting(name)) return {};
  if (std::find(std::begin(kOtherNames), std::end(kOtherNames), name) != std::end(kOtherNames)) return {};
  std::vector<std::string_view> known;
  for (const SettingHelp& help : AllSettings()) known.push_back(help.name);
  std::string m = "unknown variable " + std::string(name.substr(0, 80));
  const std::string_view nearest = NearestName(name, known);
  m += nearest.empty() ? "; the known ones are " + JoinNames(known) : "; did you mean " + std::string(nearest) + "?";
  return Status::Usage(std::move(m));
}

// These two write what ReadPatterns and ReadIntervals read.
std::string JoinPatterns(const NameFilter& filter) {
  std::string out;
  for (const std::string& pattern : filter.patterns) out += (out.empty() ? "" : ",") + pattern;
  return out;
}

std::string FormatIntervals(const IntervalSet& set) {
  std::string out;
  for (const auto& [low, high] : set.ranges) {
    if (!out.empty()) out += ',';
    out += std::to_string(low);
    if (high == kMaxInterval) {
      out += '-';
    } else if (high != low) {
      out += '-' + std::to_string(high);
    }
  }
  return out;
}

}  // namespace

std::string_view NameOf(Level level) {
  switch (level) {
    case Level::kNames:
      return "names";
    case Level::kShapes:
      return "shapes";
    case Level::kStats:
      return "stats";
    case Level::kSample:
      return "sample";
    case Level::kPayload:
      return "payload";
  }
  return "unknown";
}

// In the order of AllSettings: ASSAY comes first, so a profile's include list is in place before ASSAY_INCLUDE replaces
// it.
Result<Settings> ParseSettings(const std::function<std::optional<std::string>(std::string_view)>& lookup) {
  Settings settings;
  for (const SettingHelp& help : AllSettings()) {
    if (const std::optional<std::string> value = lookup(help.name)) {
      ASSAY_RETURN_IF_ERROR(ReadOne(help.name, *value, &settings));
    }
  }
  return settings;
}

Result<Settings> ParseSettings(std::span<const std::string> assignments, bool over_environment) {
  std::vector<std::pair<std::string_view, std::string_view>> values;
  if (over_environment) {
    for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
      const std::string_view text(*entry);
      const size_t equals = text.find('=');
      const std::string_view name = text.substr(0, equals);
      if (equals == std::string_view::npos || (name != "ASSAY" && name.substr(0, 6) != "ASSAY_")) continue;
      ASSAY_RETURN_IF_ERROR(CheckName(name));
      if (name == "ASSAY_ISA") ASSAY_RETURN_IF_ERROR(CheckIsaName(text.substr(equals + 1)));
      values.emplace_back(name, text.substr(equals + 1));
    }
  }
  for (const std::string& text : assignments) {
    const size_t equals = text.find('=');
    if (equals == std::string::npos) {
      return Status::Usage("setting \"" + text.substr(0, 80) + "\": expected NAME=VALUE such as ASSAY_LEVEL=payload");
    }
    const std::string_view name = std::string_view(text).substr(0, equals);
    ASSAY_RETURN_IF_ERROR(CheckName(name));
    if (!IsSetting(name)) {
      return Status::Usage(std::string(name) + " is read from the environment alone; set it there");
    }
    values.emplace_back(name, std::string_view(text).substr(equals + 1));
  }
  return ParseSettings([&](std::string_view name) -> std::optional<std::string> {
    for (auto it = values.rbegin(); it != values.rend(); ++it) {
      if (it->first == name) return std::string(it->second);
    }
    return std::nullopt;
  });
}

// Not safe beside setenv() in another thread, as every reading of the environment.
Result<Settings> SettingsFromEnvironment() { return ParseSettings({}, true); }

std::vector<std::pair<std::string, std::string>> FormatSettings(const Settings& s) {
  std::vector<std::pair<std::string, std::string>> out;
  const auto add = [&](const char* name, std::string value) {
    if (!value.empty()) out.emplace_back(name, std::move(value));
  };
  add("ASSAY", s.on() ? s.profile + (s.sink.empty() ? "" : ":" + s.sink) : "off");
  add("ASSAY_DIR", s.dir);
  std::string level(NameOf(s.level));
  if (s.level == Level::kSample) level += ':' + std::to_string(s.sample_rows);
  add("ASSAY_LEVEL", level);
  add("ASSAY_INCLUDE", JoinPatterns(s.include));
  add("ASSAY_EXCLUDE", JoinPatterns(s.exclude));
  add("ASSAY_LAYERS", FormatIntervals(s.layers));
  add("ASSAY_RANKS", FormatIntervals(s.ranks));
  add("ASSAY_STEPS", FormatIntervals(s.steps));
  add("ASSAY_BUDGET", "events=" + std::to_string(s.byte_cap) + ",payload=" + std::to_string(s.payload_budget));
  add("ASSAY_GRIDS", s.row_grid ? (s.head_grid ? "rows,heads" : "rows") : (s.head_grid ? "heads" : "none"));
  add("ASSAY_THREADS", std::to_string(s.threads));
  add("ASSAY_SEGMENT", std::to_string(s.segment_rows));
  add("ASSAY_SEED", std::to_string(s.seed));
  add("ASSAY_RING", std::to_string(s.ring_steps));
  add("ASSAY_TOKENS", s.tokens ? "on" : "off");
  add("ASSAY_PROBES", s.probes);
  add("ASSAY_ATTACH", s.attach);
  add("ASSAY_ARMED", s.armed ? "on" : "off");
  add("ASSAY_STRICT", s.strict ? "on" : "off");
  return out;
}

Result<uint64_t> ParseSize(std::string_view variable, std::string_view text) {
  Cursor cursor{variable, text};
  ASSAY_ASSIGN_OR_RETURN(const uint64_t size, ReadSize(&cursor));
  if (!cursor.done()) return cursor.Expected("the end");
  return size;
}

// Levenshtein distance by one row of the table; names beyond 256 characters are no slip of the pen.
std::string_view NearestName(std::string_view name, std::span<const std::string_view> known) {
  std::string_view best;
  size_t best_distance = SIZE_MAX;
  if (name.size() > 256) return best;
  std::vector<size_t> row;
  for (std::string_view candidate : known) {
    row.resize(candidate.size() + 1);
    for (size_t j = 0; j < row.size(); ++j) row[j] = j;
    for (size_t i = 0; i < name.size(); ++i) {
      size_t diagonal = row[0];
      row[0] = i + 1;
      for (size_t j = 0; j < candidate.size(); ++j) {
        const size_t substituted = diagonal + (name[i] == candidate[j] ? 0 : 1);
        diagonal = row[j + 1];
        row[j + 1] = std::min({substituted, row[j] + 1, row[j + 1] + 1});
      }
    }
    const size_t distance = row.back();
    // Closer than half of the candidate's length: beyond that "did you mean" would be a guess.
    if (distance < best_distance && distance * 2 <= candidate.size()) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

}  // namespace assay
