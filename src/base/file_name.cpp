#include "base/file_name.h"

namespace assay {

std::string SafeFileName(std::string_view text) {
  std::string safe;
  for (char c : text) {
    const bool plain =
        (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '.';
    safe.push_back(plain ? c : '_');
  }
  if (safe.empty() || safe[0] == '.') safe.insert(0, "host");
  return safe.substr(0, 64);
}

}  // namespace assay
