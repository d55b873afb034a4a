#include "tensor/decode.h"

#include "tensor/dispatch.h"

namespace assay {
namespace {

// The type is chosen once a call, not once an element: the loop inside is compiled for each type and has no branch on
// it. float is exact for all types of 16 bits or fewer and for f32.
template <class Out>
void DecodeAny(const void* data, int64_t first, int64_t n, DType dtype, Out* out) {
  WithDType(dtype, [&]<DType kType>() {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<Out>(DecodeElement<kType>(LoadBits(data, first + i, kType)));
  });
}

}  // namespace

void DecodeTo(const void* data, int64_t first, int64_t n, DType dtype, double* out) {
  DecodeAny(data, first, n, dtype, out);
}

void DecodeTo(const void* data, int64_t first, int64_t n, DType dtype, float* out) {
  DecodeAny(data, first, n, dtype, out);
}

}  // namespace assay
