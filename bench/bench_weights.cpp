// Speed of the weight audit on one core: stored bytes decoded and measured a second, by format.
//
//   bench_weights [--json FILE] [--mib N] [--repeats N]
//
// Weights are random codes of --mib (64) MiB in memory; every figure is the median of --repeats (9) timings in
// processor time of the thread. GB are 10^9 bytes of the file, scales included. "decode" is the decoder alone, "audit"
// is what `assay weights` does with a weight: decode, statistics, digest, scales. The baseline, in turn with both, is
// adding up the stored bytes as 64-bit words.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "base/hash.h"
#include "check/weights_audit.h"
#include "quant/weight.h"

namespace {

using namespace assay;

double Now() {
  std::timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

struct Line {
  std::string name;
  double value;
  double read;  // baseline, GB/s
};

// A tensor over bytes of its own. fill: the byte of index i.
struct Stored {
  std::vector<std::byte> bytes;
  CheckpointTensor tensor;

  Stored(const char* name, DType dtype, std::vector<int64_t> shape, uint64_t size_bytes,
         const std::function<uint8_t(uint64_t)>& fill)
      : bytes(size_bytes) {
    for (uint64_t i = 0; i < size_bytes; ++i) bytes[i] = std::byte{fill(i)};
    tensor.name = name;
    tensor.dtype = dtype;
    tensor.shape = std::move(shape);
    tensor.data = bytes.data();
    tensor.size_bytes = size_bytes;
    tensor.file = "bench";
  }
};

uint8_t Random(uint64_t i) { return static_cast<uint8_t>(Mix64(i + 1)); }
// Finite float8: 0x7f and 0xff are NaN.
uint8_t RandomFloat8(uint64_t i) {
  const uint8_t byte = Random(i);
  return (byte & 0x7f) == 0x7f ? uint8_t{0} : byte;
}

double MedianOf(int repeats, const std::function<void()>& work) {
  std::vector<double> seconds;
  for (int i = 0; i < repeats; ++i) {
    const double start = Now();
    work();
    seconds.push_back(Now() - start);
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

void Measure(const std::string& name, const Result<WeightPtr>& made, int repeats, std::vector<Line>* lines) {
  if (!made.ok()) {
    std::fprintf(stderr, "%s: %s\n", name.c_str(), made.status().message().c_str());
    std::exit(1);
  }
  const Weight& weight = **made;
  const double gigabytes = static_cast<double>(weight.stored_bytes()) * 1e-9;
  std::vector<float> row(static_cast<size_t>(weight.cols()));
  uint64_t sum = 0;
  const double read = MedianOf(repeats, [&] {
    for (const StoredPart& part : weight.stored()) {
      const std::byte* bytes = part.tensor->data;
      for (uint64_t i = 0; i + 8 <= part.tensor->size_bytes; i += 8) {
        uint64_t word;
        std::memcpy(&word, bytes + i, 8);
        sum += word;
      }
    }
  });
  volatile uint64_t sink = sum;
  (void)sink;
  const double decode = MedianOf(repeats, [&] {
    for (int64_t r = 0; r < weight.rows(); ++r) weight.Decode(r, 1, row.data());
  });
  const double audit = MedianOf(repeats, [&] { MeasureWeight(weight); });
  lines->push_back({"weights: " + name + ", decode, one core", gigabytes / decode, gigabytes / read});
  lines->push_back({"weights: " + name + ", audit, one core", gigabytes / audit, gigabytes / read});
}

}  // namespace

int main(int argc, char** argv) {
  std::string json;
  int64_t mib = 64;
  int repeats = 9;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i];
    if (key == "--json") json = argv[i + 1];
    if (key == "--mib") mib = std::max(1, std::atoi(argv[i + 1]));
    if (key == "--repeats") repeats = std::max(1, std::atoi(argv[i + 1]));
  }
  constexpr int64_t kCols = 4096;
  const int64_t rows = mib * 256;  // of kCols bytes
  const auto size = [](int64_t a, int64_t b) { return static_cast<uint64_t>(a) * static_cast<uint64_t>(b); };
  const auto one = [](uint64_t i) { return static_cast<uint8_t>(i % 4 == 3 ? 0x3f : i % 4 == 2 ? 0x80 : 0); };  // 1.0f
  std::vector<Line> lines;
  {
    const Stored code("w", DType::kF8E4M3FN, {rows, kCols}, size(rows, kCols), RandomFloat8);
    const Stored scale("s", DType::kF32, {rows / 128, kCols / 128}, size(rows / 128, kCols / 128) * 4, one);
    Measure("f8_e4m3fn_128x128", MakeByteWeight("w", code.tensor, &scale.tensor, nullptr, 128, 128), repeats, &lines);
  }
  {
    const Stored code("w", DType::kU8, {rows, kCols}, size(rows, kCols), Random);
    const Stored scale("s", DType::kF8E4M3FN, {rows, kCols / 8}, size(rows, kCols / 8), RandomFloat8);
    const Stored global("g", DType::kF32, {}, 4, one);
    Measure("nvfp4", MakeFp4Weight("w", code.tensor, scale.tensor, &global.tensor, {}), repeats, &lines);
    const Stored exponent("s", DType::kU8, {rows, kCols / 16}, size(rows, kCols / 16),
                          [](uint64_t) { return uint8_t{120}; });
    Measure("mxfp4", MakeFp4Weight("w", code.tensor, exponent.tensor, nullptr, {32, true, false}), repeats, &lines);
  }
  {
    const Stored code("w", DType::kBF16, {rows, kCols / 2}, size(rows, kCols), [](uint64_t i) {
      return i % 2 == 0 ? Random(i) : static_cast<uint8_t>(Random(i) & 0xbf);  // below infinity
    });
    Measure("bf16", MakePlainWeight("w", code.tensor), repeats, &lines);
  }
  {
    constexpr int64_t kBlock = 144, kBlocks = 16;
    const Stored code("w", DType::kInvalid, {rows, kBlocks * 256}, size(rows, kBlocks * kBlock), [](uint64_t i) {
      return i % 144 == 1 || i % 144 == 3 ? uint8_t{0x20} : Random(i);  // finite half scales
    });
    Measure("q4_k", MakeGgmlWeight("w", code.tensor, 12), repeats, &lines);
  }
  for (const Line& line : lines)
    std::printf("%-48s %8.3f GB/s, reading %.3f\n", line.name.c_str(), line.value, line.read);
  if (json.empty()) return 0;
  std::FILE* out = std::fopen(json.c_str(), "w");
  if (out == nullptr) return 4;
  std::fprintf(out, "{\"schema\": \"assay.bench/1\", \"results\": [");
  for (size_t i = 0; i < lines.size(); ++i) {
    std::fprintf(out,
                 "%s\n  {\"name\": \"%s\", \"value\": %.6g, \"unit\": \"GB/s\", \"baseline\": \"read the same bytes\", "
                 "\"baseline_value\": %.6g}",
                 i != 0 ? "," : "", lines[i].name.c_str(), lines[i].value, lines[i].read);
  }
  std::fprintf(out, "\n]}\n");
  return std::fclose(out) == 0 ? 0 : 4;
}
