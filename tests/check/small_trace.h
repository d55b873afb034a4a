// Writes small traces through the recorder, as a host would, and reads them back.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <bit>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "capture/capture.h"
#include "probe/recorder.h"

namespace assay::testing {

struct Put {
  std::vector<RowRun> rows = {};
  int64_t step = 0;
  int32_t rank = 0;
  Phase phase = Phase::kPrefill;
  uint32_t flags = 0;
  Shard shard = {};
  uint64_t address = 0;               // 0: a fresh one a call
  std::vector<int64_t> strides = {};  // empty: contiguous
  std::vector<std::pair<std::string_view, std::string_view>> meta = {};
  DType compute = DType::kF32;
};

// Nearest bf16, ties to even, of a float; apart from what the sources round with.
inline double Bf16(double x) {
  auto bits = std::bit_cast<uint32_t>(static_cast<float>(x));
  bits += 0x7fff + ((bits >> 16) & 1);
  return double{std::bit_cast<float>(bits & 0xffff0000U)};
}

class SmallTrace {
 public:
  explicit SmallTrace(int32_t world_size = 1, Level level = Level::kPayload) {
    std::string pattern = (std::filesystem::temp_directory_path() / "assay-check-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
    Settings settings;
    settings.profile = "all";
    settings.dir = folder_ + "/trace";
    settings.level = level;
    ProcessInfo process;
    process.world_size = world_size;
    auto recorder = Recorder::Open(settings, process);
    EXPECT_TRUE(recorder.ok()) << recorder.status().message();
    recorder_ = std::move(recorder).value();
  }
  ~SmallTrace() {
    recorder_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

  // A request of these tokens; gives its key.
  uint64_t Request(std::vector<int64_t> tokens) {
    RequestInfo info;
    info.key = 1000 + ++n_requests_;
    info.prompt_tokens = static_cast<int64_t>(tokens.size());
    info.tokens = std::move(tokens);
    EXPECT_TRUE(recorder_->AddRequest(info).ok());
    return info.key;
  }

  template <class T>
  void Record(std::string_view site, std::string_view axes, std::vector<int64_t> shape, const std::vector<T>& values,
              const Put& put = {}) {
    std::vector<int64_t> strides = put.strides;
    if (strides.empty()) {
      strides.assign(shape.size(), 1);
      for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
    }
    Observation o;
    o.site = site;
    o.axes = axes;
    o.view = {values.data(), DTypeOf(T{}), shape, strides, 0};
    o.rank = put.rank;
    o.step = put.step;
    o.phase = put.phase;
    o.flags = put.flags;
    o.compute_dtype = put.compute;
    o.shard = put.shard;
    o.meta = put.meta;
    o.base_address = put.address != 0 ? put.address : next_address_ += 1 << 20;
    o.runs = put.rows;
    const Status status = recorder_->Record(o);
    EXPECT_TRUE(status.ok()) << status.message();
  }

  // Closes the recording and opens it.
  std::unique_ptr<Capture> Open() {
    EXPECT_TRUE(recorder_->Close().ok());
    auto capture = Capture::Open(folder_ + "/trace");
    EXPECT_TRUE(capture.ok()) << capture.status().message();
    return capture.ok() ? std::move(capture).value() : nullptr;
  }

 private:
  static DType DTypeOf(float) { return DType::kF32; }
  static DType DTypeOf(double) { return DType::kF64; }
  static DType DTypeOf(int64_t) { return DType::kI64; }
  static DType DTypeOf(int8_t) { return DType::kI8; }

  std::string folder_;
  std::unique_ptr<Recorder> recorder_;
  uint64_t n_requests_ = 0;
  uint64_t next_address_ = 1 << 20;
};

// n values that differ, from a seed.
inline std::vector<float> Noise(size_t n, uint64_t seed) {
  std::vector<float> out(n);
  uint64_t x = seed * 0x9E3779B97F4A7C15u + 1;
  for (float& v : out) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    v = static_cast<float>(static_cast<double>(x >> 11) * 0x1p-53 * 2 - 1);
  }
  return out;
}

}  // namespace assay::testing
