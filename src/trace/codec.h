// Events and the other records to bytes and back. Encoding writes into space that the caller has; decoding trusts
// nothing until CheckEvent has passed.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "trace/event.h"
#include "trace/format.h"

namespace assay::codec {

// --- events --------------------------------------------------------------------------------------------------------

// Size of the record, header included, a multiple of 8. kUsage for an event that the format cannot hold: more than 64
// axes, a count beyond its field, a payload hash that is not 64 hex digits, more than kMaxRecordBytes.
Result<uint32_t> EventSize(const Event& event);
// Writes everything but the record header's first 8 bytes and its checksum. record has EventSize bytes, 8-aligned.
void EncodeEvent(const Event& event, unsigned char* record);
// Overwrites sequence and time of an encoded event.
void PatchEvent(unsigned char* record, uint64_t sequence, uint64_t time_ns);
// True when every offset and count inside the record (header checked before) stays inside it. Call once; then
// DecodeEvent and EventView need no further check.
bool CheckEvent(const unsigned char* record, uint32_t size_bytes);
// REQUIRES: CheckEvent passed.
Event DecodeEvent(const unsigned char* record);
// Value of a metadata key in place; empty when the event does not have it. REQUIRES: CheckEvent passed.
std::string_view FindMeta(const unsigned char* record, std::string_view key);

// --- other records: body bytes behind AuxHead ------------------------------------------------------------------------

// Bodies without padding; the writer pads the record. Texts are u32 length and bytes, lists a u64 count and the items.
std::string EncodeProcess(const ProcessInfo& process);
std::string EncodeSite(const SiteInfo& site);
std::string EncodeRequest(const RequestInfo& request);
std::string EncodeCoverage(const CoverageNote& note);
std::string EncodeMeta(const std::string& key, const std::string& value);
// False when the bytes do not hold such a record. Bytes behind the known fields are ignored.
bool DecodeProcess(std::span<const unsigned char> body, ProcessInfo* out);
bool DecodeSite(std::span<const unsigned char> body, SiteInfo* out);
bool DecodeRequest(std::span<const unsigned char> body, RequestInfo* out);
bool DecodeCoverage(std::span<const unsigned char> body, CoverageNote* out);
bool DecodeMeta(std::span<const unsigned char> body, std::string* key, std::string* value);

// --- record frame ----------------------------------------------------------------------------------------------------

// Checksum of a whole record as stored in its header.
uint32_t RecordCrc(const unsigned char* record, uint32_t size_bytes);

// --- floats with a shared exponent -----------------------------------------------------------------------------------

// 2^exponent, clamped to the normal range of double.
double ScaleOf(int16_t exponent);

}  // namespace assay::codec
