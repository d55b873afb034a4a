// What all views of one file share.
#pragma once

#include <cstdint>

#include "trace/reader.h"

namespace assay {

struct EventView::Layout {
  uint32_t file = 0;                       // index into Trace::processes()
  const unsigned char* base = nullptr;     // first byte of the file
  const uint32_t* global_sites = nullptr;  // by SiteInfo::id
};

}  // namespace assay
