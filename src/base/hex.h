// Lower-case hexadecimal text of bytes and words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace assay {

// Two digits a byte, in memory order.
std::string HexEncode(const void* data, size_t size_bytes);
// 16 digits, most significant first.
std::string Hex64(uint64_t value);
// Exactly 2 * size_bytes hex digits of either case into out; false (out unspecified) for anything else.
bool HexDecode(std::string_view text, void* out, size_t size_bytes);

}  // namespace assay
