// Any bytes as JSON. What parses is written to text that parses to the same text; errors name a byte of the input.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "io/json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const assay::Result<assay::Json> parsed = assay::ParseJson(text, "input");
  if (!parsed.ok()) {
    const std::string& message = parsed.status().message();
    const std::string_view prefix = "input: invalid JSON at byte ";
    if (message.compare(0, prefix.size(), prefix) != 0) std::abort();
    if (std::strtoull(message.c_str() + prefix.size(), nullptr, 10) > size) std::abort();
    return 0;
  }
  const std::string written = assay::WriteJson(*parsed, -1);
  const assay::Result<assay::Json> again = assay::ParseJson(written, "written");
  if (!again.ok() || assay::WriteJson(*again, -1) != written) std::abort();
  return 0;
}
