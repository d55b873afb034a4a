// Selectors of a Python host (ASSAY_PROBES) and names of profiles (ASSAY_ATTACH); docs/attach.md has the grammar.
#include <algorithm>
#include <iterator>

#include "probe/settings_reader.h"

namespace assay::settings_reader {
namespace {

// Kinds of probe that assay.attach knows; only their form is checked here.
constexpr std::string_view kSelectorKinds[] = {"module", "call", "local", "audit"};

// "pkg.mod:Class.method" or with dots alone: parts that are Python names.
// At least two parts: a bare name says no module. Bytes of 128 and above are taken as letters of a Python name in
// UTF-8.
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
// A local variable of a function: any assignment, the N-th (from 1, six digits at most) or the last.
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
    return cursor.Expected("module:GLOB[:out], call:DOTTED, local:DOTTED:NAME[#N|#last] or audit:DOTTED:NAME", start);
  }
  const std::string_view rest = text.substr(colon + 1);
  const size_t rest_at = start + colon + 1;
  if (kind == "module") {
    const size_t end = std::min(rest.find(':'), rest.size());
    if (end == 0) return cursor.Expected("a glob over module names", rest_at);
    const bool good = end == rest.size() || rest.substr(end) == ":out";
    return good ? Status() : cursor.Expected("nothing or :out behind the glob", rest_at + end);
  }
  if (kind == "call") return IsDottedName(rest) ? Status() : cursor.Expected(kDotted, rest_at);
  // The last colon parts function and variable: the function's own name may hold one (pkg.mod:Class.method).
  const size_t last = rest.rfind(':');
  const std::string_view target = rest.substr(0, last);
  const std::string_view name = last == std::string_view::npos ? std::string_view() : rest.substr(last + 1);
  if (!IsDottedName(target)) return cursor.Expected(kDotted, rest_at);
  if (last == std::string_view::npos || !IsVariable(name)) {
    return cursor.Expected(":NAME, :NAME#N or :NAME#last behind the function", rest_at + target.size());
  }
  return {};
}

}  // namespace

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

// "all" and "none" pass as names of one part behind the "x." that stands for a module.
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

}  // namespace assay::settings_reader
