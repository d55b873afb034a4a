// payloads/<sha256>: tensors stored once by their content, however many events and processes refer to them.
// Files appear under their final name only when they are whole (written aside, then renamed).
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "trace/event.h"

namespace assay {

inline constexpr char kPayloadFolder[] = "payloads";

// dir: the trace folder. *written_bytes: 0 when the content was there already. limit_bytes: kUsage when the content is
// new and larger. kEnvironment: the disk refused; nothing is left behind.
Result<PayloadRef> StorePayload(const std::string& dir, const void* data, uint64_t size_bytes, uint64_t limit_bytes,
                                uint64_t* written_bytes);

}  // namespace assay
