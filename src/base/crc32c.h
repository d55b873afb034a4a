// CRC-32C (Castagnoli, reflected polynomial 0x82f63b78, initial value and final xor of all ones): the checksum of trace
// records. The SSE4.2 instruction is used where the machine has it, eight tables of 256 words elsewhere; both give the
// same value. It finds damage, not malice.
#pragma once

#include <cstddef>
#include <cstdint>

namespace assay {

// Checksum of a followed by b, given crc = Crc32c(a): Crc32cExtend(crc, b). Crc32c of nothing is 0.
uint32_t Crc32cExtend(uint32_t crc, const void* data, size_t size_bytes);
inline uint32_t Crc32c(const void* data, size_t size_bytes) { return Crc32cExtend(0, data, size_bytes); }

// The table version alone, whatever the machine; for tests.
uint32_t Crc32cExtendPortable(uint32_t crc, const void* data, size_t size_bytes);

}  // namespace assay
