#include "base/hex.h"

namespace assay {
namespace {

constexpr char kDigits[] = "0123456789abcdef";

// Value of a digit of either case, -1 for any other byte; ASCII, so no locale decides.
int Digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

}  // namespace

std::string HexEncode(const void* data, size_t size_bytes) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::string text(2 * size_bytes, '0');
  for (size_t i = 0; i < size_bytes; ++i) {
    text[2 * i] = kDigits[bytes[i] >> 4];
    text[2 * i + 1] = kDigits[bytes[i] & 15];
  }
  return text;
}

std::string Hex64(uint64_t value) {
  std::string text(16, '0');
  for (size_t i = 16; i-- > 0; value >>= 4) text[i] = kDigits[value & 15];
  return text;
}

// Halves the length of the text instead of doubling size_bytes, which could wrap.
bool HexDecode(std::string_view text, void* out, size_t size_bytes) {
  if (text.size() / 2 != size_bytes || text.size() % 2 != 0) return false;
  auto* bytes = static_cast<unsigned char*>(out);
  for (size_t i = 0; i < size_bytes; ++i) {
    const int high = Digit(text[2 * i]);
    const int low = Digit(text[2 * i + 1]);
    if (high < 0 || low < 0) return false;
    bytes[i] = static_cast<unsigned char>(high * 16 + low);
  }
  return true;
}

}  // namespace assay
