// A Status as the C interfaces hand it out: a code and a message in the caller's memory.
#pragma once

#include <algorithm>
#include <cstring>
#include <new>
#include <string_view>

#include "assay/assay.h"
#include "base/status.h"

namespace assay {

// Returns code. error: NULL, or the caller's; a message that does not fit is cut.
inline int SetError(assay_error* error, int code, std::string_view message) {
  if (error == nullptr) return code;
  const size_t size = std::min(message.size(), sizeof(error->message) - 1);
  std::memcpy(error->message, message.data(), size);
  error->message[size] = '\0';
  return code;
}

// An OK status empties the message.
inline int SetError(assay_error* error, const Status& status) {
  return SetError(error, static_cast<int>(status.code()), status.message());
}

// Runs f, which returns a Status, and hands its outcome to C. Nothing thrown leaves it.
template <class F>
int RunForC(assay_error* error, F&& f) {
  try {
    return SetError(error, f());
  } catch (const std::bad_alloc&) {
    return SetError(error, ASSAY_ERROR_ENVIRONMENT, "no memory");
  } catch (...) {
    return SetError(error, ASSAY_ERROR_INTERNAL, "unexpected exception");
  }
}

}  // namespace assay
