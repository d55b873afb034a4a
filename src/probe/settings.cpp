#include "probe/settings.h"

#include <regex.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <climits>
#include <limits>

#include "stats/measure.h"

extern char** environ;

namespace assay {
namespace {

// Read by other parts of assay, from the environment alone: known names, not settings of a recording.
constexpr std::string_view kOtherNames[] = {"ASSAY_ISA", "ASSAY_LIBRARY", "ASSAY_TEST_STAGES"};

constexpr std::string_view kSelectorKinds[] = {"module", "call", "local", "audit"};

constexpr int64_t kMaxInterval = std::numeric_limits<int64_t>::max();

// Where a value is being read. Columns count from 1 in the value of the variable.
struct Cursor {
  std::string_view variable;
  std::string_view text;
  size_t at = 0;

  bool done() const { return at >= text.size(); }
  char peek() const { return done() ? '\0' : text[at]; }
  bool take(char c) {
    if (peek() != c || done()) return false;
    ++at;
    return true;
  }
  // "ASSAY_LAYERS, column 3: expected a number, found "x" (in "0,x")"
  Status Expected(std::string_view what, size_t where) const {
    std::string m(variable);
    m += ", column " + std::to_string(where + 1) + ": expected ";
    m += what;
    if (where >= text.size()) {
      m += ", found the end";
    } else {
      m += ", found \"" + std::string(text.substr(where, 24)) + "\"";
    }
    if (where != 0) m += " (in \"" + std::string(text.substr(0, 120)) + "\")";
    return Status::Usage(std::move(m));
  }
  Status Expected(std::string_view what) const { return Expected(what, at); }

  Result<uint64_t> Number(std::string_view what) {
    uint64_t value = 0;
    const char* begin = text.data() + at;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(begin, end, value);
    if (stop == begin || error != std::errc()) return Expected(what);
    at += static_cast<size_t>(stop - begin);
    return value;
  }
};

std::string Lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

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

// What the C library's matcher can be made to do with a hostile pattern is bounded here: no back references
// (exponential time) and a bounded product of repetition counts (memory). The library expands x{n,m} into m copies of
// x, x{n,} into n + 1 and x+ into 2, and copies nest, as in (x+)+ or x++: the product over the whole pattern bounds
// them, nested or not. A plus sign in a bracket counts too, which refuses a little more than it must.
Status CheckRegex(const Cursor& cursor, size_t start, const std::string& pattern) {
  constexpr size_t kMaxLength = 512;
  constexpr uint64_t kMaxRepetition = 1000;
  if (pattern.size() > kMaxLength) return cursor.Expected("a regular expression of at most 512 characters", start);
  uint64_t product = 1;
  for (size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] == '\\' && i + 1 < pattern.size()) {
      ++i;
      if (pattern[i] >= '1' && pattern[i] <= '9') {
        return cursor.Expected("a regular expression without back references", start + i);
      }
    } else if (pattern[i] == '{' || pattern[i] == '+') {
      uint64_t count = pattern[i] == '+' ? 2 : 1;
      for (size_t j = i + 1; pattern[i] == '{' && j < pattern.size() && pattern[j] != '}'; ++j) {
        uint64_t value = 0;
        const auto [stop, error] = std::from_chars(pattern.data() + j, pattern.data() + pattern.size(), value);
        if (error == std::errc::result_out_of_range) value = kMaxRepetition + 1;
        if (stop == pattern.data() + j) continue;
        const bool open_ended = std::string_view(stop, pattern.data() + pattern.size()).starts_with(",}");
        count = std::max(count, value + (open_ended ? 1 : 0));
        j = static_cast<size_t>(stop - pattern.data()) - 1;
      }
      product = count > kMaxRepetition ? kMaxRepetition + 1 : product * count;
      if (product > kMaxRepetition) {
        return cursor.Expected("repetition counts (+ is 2) whose product is at most 1000", start + i);
      }
    }
  }
  regex_t regex;
  const int error = regcomp(&regex, pattern.c_str(), REG_EXTENDED | REG_NOSUB);
  if (error != 0) {
    char why[128];
    regerror(error, &regex, why, sizeof(why));
    return cursor.Expected(std::string("a POSIX extended regular expression (") + why + ")", start);
  }
  regfree(&regex);
  return {};
}

Result<NameFilter> ReadPatterns(std::string_view variable, std::string_view text) {
  NameFilter filter;
  Cursor cursor{variable, text};
  do {
    const size_t start = cursor.at;
    if (cursor.take('/')) {
      while (!cursor.done() && cursor.peek() != '/') cursor.at += cursor.peek() == '\\' ? 2 : 1;
      if (cursor.at > text.size()) cursor.at = text.size();
      const std::string pattern(text.substr(start + 1, cursor.at - start - 1));
      if (!cursor.take('/')) return cursor.Expected("a closing '/' of the regular expression");
      if (pattern.empty()) return cursor.Expected("a regular expression between the slashes", start);
      ASSAY_RETURN_IF_ERROR(CheckRegex(cursor, start + 1, pattern));
      if (!cursor.done() && cursor.peek() != ',') return cursor.Expected("',' behind the regular expression");
    } else {
      // A comma inside [...] belongs to the glob.
      bool bracket = false;
      while (!cursor.done() && (bracket || cursor.peek() != ',')) {
        if (cursor.peek() == '[') bracket = text.find(']', cursor.at) != std::string_view::npos;
        if (cursor.peek() == ']') bracket = false;
        ++cursor.at;
      }
      if (cursor.at == start) return cursor.Expected("a glob such as layers.*.attn.q, or /regex/", start);
    }
    filter.patterns.emplace_back(text.substr(start, cursor.at - start));
  } while (cursor.take(','));
  return filter;
}

Result<int64_t> ReadCount(std::string_view variable, std::string_view text, int64_t low, int64_t high) {
  Cursor cursor{variable, text};
  const std::string what = "a whole number from " + std::to_string(low) + " to " + std::to_string(high);
  ASSAY_ASSIGN_OR_RETURN(const uint64_t value, cursor.Number(what));
  if (!cursor.done()) return cursor.Expected("nothing behind the number");
  if (value > static_cast<uint64_t>(high) || value < static_cast<uint64_t>(low)) return cursor.Expected(what, 0);
  return static_cast<int64_t>(value);
}

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

// "pkg.mod:Class.method" or with dots alone: parts that are Python names.
bool IsDottedName(std::string_view text) {
  size_t part = 0;
  bool dotted = false;
  for (size_t i = 0; i <= text.size(); ++i) {
    const char c = i < text.size() ? text[i] : '.';
    if (c == '.' || c == ':') {
      if (i == part) return false;
      if (c == ':' && text.find(':', i + 1) != std::string_view::npos) return false;
      dotted = dotted || i < text.size();
      part = i + 1;
    } else if (!(c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || static_cast<unsigned char>(c) >= 128 ||
                 (c >= '0' && c <= '9' && i != part))) {
      return false;
    }
  }
  return dotted;
}

// "k", "k#2", "k#last"
bool IsVariable(std::string_view text) {
  const size_t hash = text.find('#');
  const std::string_view name = text.substr(0, hash);
  if (name.find_first_of(".:") != std::string_view::npos || !IsDottedName("x." + std::string(name))) return false;
  if (hash == std::string_view::npos) return true;
  const std::string_view which = text.substr(hash + 1);
  if (which == "last") return true;
  return !which.empty() && which.size() <= 6 && which[0] != '0' &&
         which.find_first_not_of("0123456789") == std::string_view::npos;
}

// Checks one selector; start is its column.
Status CheckSelector(const Cursor& cursor, size_t start, std::string_view text) {
  constexpr std::string_view kDotted = "a dotted name such as pkg.mod:Class.method";
  const size_t colon = text.find(':');
  const std::string_view kind = text.substr(0, colon);
  if (colon == std::string_view::npos ||
      std::find(std::begin(kSelectorKinds), std::end(kSelectorKinds), kind) == std::end(kSelectorKinds)) {
    return cursor.Expected("module:GLOB, call:DOTTED, local:DOTTED:NAME[#N|#last] or audit:DOTTED:NAME", start);
  }
  const std::string_view rest = text.substr(colon + 1);
  const size_t rest_at = start + colon + 1;
  if (kind == "module") return rest.empty() ? cursor.Expected("a glob over module names", rest_at) : Status();
  if (kind == "call") return IsDottedName(rest) ? Status() : cursor.Expected(kDotted, rest_at);
  const size_t last = rest.rfind(':');
  const std::string_view target = rest.substr(0, last);
  const std::string_view name = last == std::string_view::npos ? std::string_view() : rest.substr(last + 1);
  if (!IsDottedName(target)) return cursor.Expected(kDotted, rest_at);
  if (last == std::string_view::npos || !IsVariable(name)) {
    return cursor.Expected(":NAME, :NAME#N or :NAME#last behind the function", rest_at + target.size());
  }
  return {};
}

Status ReadProbes(std::string_view variable, std::string_view text, Settings* s) {
  const Cursor cursor{variable, text};
  for (size_t start = 0; start <= text.size();) {
    const size_t comma = std::min(text.find(',', start), text.size());
    ASSAY_RETURN_IF_ERROR(CheckSelector(cursor, start, text.substr(start, comma - start)));
    start = comma + 1;
  }
  s->probes = text;
  return {};
}

Status ReadAttach(std::string_view variable, std::string_view text, Settings* s) {
  const Cursor cursor{variable, text};
  for (size_t start = 0; start <= text.size();) {
    const size_t comma = std::min(text.find(',', start), text.size());
    if (!IsDottedName("x." + std::string(text.substr(start, comma - start)))) {
      return cursor.Expected("a profile such as vllm, the dotted name of a module, all or none", start);
    }
    start = comma + 1;
  }
  s->attach = text;
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

bool IsSetting(std::string_view name) {
  const auto settings = AllSettings();
  return std::any_of(settings.begin(), settings.end(), [&](const SettingHelp& h) { return h.name == name; });
}

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
    if (distance < best_distance && distance * 2 <= candidate.size()) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

}  // namespace assay
