// From the flat structs of assay.h, of whatever age, to the recorder's types.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "assay/assay.h"
#include "base/status.h"
#include "probe/recorder.h"

namespace assay {

// Copies *in over *out as far as the caller's struct reaches; *out holds the values of "not said" before. A struct
// that is shorter than version 1 of this interface, or absurdly long, is kUsage: struct_size was not set.
Status ReadStructBytes(const void* in, uint64_t least_size, uint64_t known_size, const char* what, void* out);

// T is the version-1 struct; when one grows, least_size stays that of version 1.
template <class T>
Status ReadStruct(const T* in, const char* what, T* out) {
  return ReadStructBytes(in, sizeof(T), sizeof(T), what, out);
}

// An Observation with the memory that it borrows from. Not copyable: the observation points into it.
struct OwnedObservation {
  OwnedObservation() = default;
  OwnedObservation(const OwnedObservation&) = delete;
  OwnedObservation& operator=(const OwnedObservation&) = delete;

  Observation observation;
  std::string name;     // "layers.3." + name
  int64_t strides[32];  // of a tensor whose caller gave none
  std::vector<RowRun> runs;
  std::vector<std::pair<std::string_view, std::string_view>> meta;
};

// Everything but the site's number is read; event comes from ReadStruct. kUsage names the field. May throw
// std::bad_alloc.
Status ReadEvent(const assay_event& event, OwnedObservation* out);

}  // namespace assay
