// Any bytes as a list of settings, one a line. What parses must format to text that parses to the same settings, and
// its patterns must match names without harm.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "probe/settings.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 4096) return 0;
  std::vector<std::string> lines(1);
  for (size_t i = 0; i < size; ++i) {
    if (data[i] == '\n') {
      lines.emplace_back();
    } else {
      lines.back() += static_cast<char>(data[i]);
    }
  }
  const assay::Result<assay::Settings> parsed = assay::ParseSettings(lines, false);
  if (!parsed.ok()) {
    if (parsed.status().message().empty()) std::abort();
    return 0;
  }
  const auto text = assay::FormatSettings(*parsed);
  std::vector<std::string> again;
  for (const auto& [name, value] : text) again.push_back(name + "=" + value);
  const assay::Result<assay::Settings> reparsed = assay::ParseSettings(again, false);
  if (!reparsed.ok() || assay::FormatSettings(*reparsed) != text) std::abort();
  for (const char* name : {"layers.3.attn.q", "logits", ""}) {
    (void)parsed->include.matches(name);
    (void)parsed->exclude.matches(name);
    (void)parsed->layers.contains(3);
  }
  return 0;
}
