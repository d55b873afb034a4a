// Statistics against the read bandwidth of the same run.
//
//   bench_stats [--json FILE] [--max-mib N] [--repeats N] [--dtype NAME] [--quick]
//
// Every figure is the median of --repeats (9) timings. The baseline is the fastest of three read loops over the same
// bytes (plain loads, loads with prefetch, four streams), timed in turn with the measurement so that a busy machine
// slows both. GB are 10^9 bytes. Without --json the table alone is printed.
//
// The data lie on transparent huge pages where the system lends them (madvise), as NumPy's large arrays do. f32 and
// bf16 of the largest size are measured once more on pages of 4 KiB, which is what malloc gives where huge pages are
// for those who ask.
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "stats/measure.h"
#include "tensor/decode.h"

namespace assay {
namespace {

// Seconds of this thread on a processor: everything here is one thread, and what a busy machine gives to others in
// between is no part of it.
double Now() {
  std::timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

struct Options {
  std::string json;
  int64_t max_mib = 1024;
  int repeats = 9;
  bool quick = false;  // one size, f32 and bf16
  DType only = DType::kInvalid;
};

struct Result {
  std::string name;
  double value;
  std::string unit;
  std::string baseline;
  double baseline_value;
};

double Median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

// Seconds of one call; short calls are repeated until 2 ms have passed.
double TimeOf(const std::function<void()>& call) {
  int64_t loops = 1;
  for (;;) {
    const double begin = Now();
    for (int64_t k = 0; k < loops; ++k) call();
    const double seconds = Now() - begin;
    if (seconds > 2e-3) return seconds / static_cast<double>(loops);
    loops *= seconds > 2e-4 ? 12 : 100;
  }
}

volatile uint64_t g_sink;

#if defined(__x86_64__)
#define ASSAY_READ_TARGETS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ASSAY_READ_TARGETS
#endif

// The read loops: an OR over all words, eight accumulators, vectorised by the compiler for the widest registers.
ASSAY_READ_TARGETS uint64_t ReadPlain(const uint64_t* p, int64_t words) {
  uint64_t acc[64] = {};
  for (int64_t k = 0; k + 64 <= words; k += 64) {
    for (int j = 0; j < 64; ++j) acc[j] |= p[k + j];
  }
  uint64_t all = 0;
  for (uint64_t v : acc) all |= v;
  return all;
}

ASSAY_READ_TARGETS uint64_t ReadPrefetching(const uint64_t* p, int64_t words) {
  uint64_t acc[64] = {};
  for (int64_t k = 0; k + 64 <= words; k += 64) {
    for (int j = 0; j < 64; j += 8) __builtin_prefetch(p + k + j + 1024);
    for (int j = 0; j < 64; ++j) acc[j] |= p[k + j];
  }
  uint64_t all = 0;
  for (uint64_t v : acc) all |= v;
  return all;
}

ASSAY_READ_TARGETS uint64_t ReadFourStreams(const uint64_t* p, int64_t words) {
  uint64_t acc[4][16] = {};
  const int64_t quarter = words / 4;
  for (int64_t k = 0; k + 16 <= quarter; k += 16) {
    for (int s = 0; s < 4; ++s) {
      for (int j = 0; j < 16; ++j) acc[s][j] |= p[s * quarter + k + j];
    }
  }
  uint64_t all = 0;
  for (auto& stream : acc) {
    for (uint64_t v : stream) all |= v;
  }
  return all;
}

enum class Pages { kHuge, kSmall };

// Fresh memory on pages of one kind; empty if there is none to be had.
class Buffer {
 public:
  Buffer(size_t bytes, Pages pages) : mapped_(bytes + kHugePage) {
    void* p = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return;
    base_ = p;
    const uintptr_t aligned = (reinterpret_cast<uintptr_t>(p) + kHugePage - 1) / kHugePage * kHugePage;
    data_ = reinterpret_cast<uint8_t*>(aligned);
    // A system without transparent huge pages refuses, and measures on what it has.
    (void)madvise(data_, bytes, pages == Pages::kHuge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  }
  ~Buffer() {
    if (base_) munmap(base_, mapped_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint8_t* data() const { return data_; }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;
  size_t mapped_;
  void* base_ = nullptr;
  uint8_t* data_ = nullptr;
};

// Fills with finite, modest values of any dtype, none of them zero.
void Fill(void* data, DType dtype, int64_t n) {
  uint64_t state = 1;
  auto next = [&state] {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state >> 33);
  };
  uint8_t* bytes = static_cast<uint8_t*>(data);
  for (int64_t k = 0; k < n; ++k) {
    const float x = (static_cast<float>(next() & 0xffffff) + 1.0f) * 0x1p-22f - 2.0f + 0x1p-24f;
    switch (dtype) {
      case DType::kF64: {
        const double d = static_cast<double>(x);
        std::memcpy(bytes + k * 8, &d, 8);
        break;
      }
      case DType::kF32:
        std::memcpy(bytes + k * 4, &x, 4);
        break;
      case DType::kBF16: {
        const uint16_t b = static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
        std::memcpy(bytes + k * 2, &b, 2);
        break;
      }
      case DType::kF16: {
        const uint16_t b = static_cast<uint16_t>((next() & 0x83ff) + 0x3800);
        std::memcpy(bytes + k * 2, &b, 2);
        break;
      }
      default: {
        const uint64_t bits = next() % 0x70 + 8 + (next() & 1) * (BitsOf(dtype) == 8 ? 0x80 : 0);
        std::memcpy(bytes + k * BitsOf(dtype) / 8, &bits, static_cast<size_t>(std::max(1, BitsOf(dtype) / 8)));
      }
    }
  }
}

std::string SizeName(int64_t bytes) {
  if (bytes >= int64_t{1} << 30) return std::to_string(bytes >> 30) + " GiB";
  if (bytes >= 1 << 20) return std::to_string(bytes >> 20) + " MiB";
  return std::to_string(bytes >> 10) + " KiB";
}

// What is measured: a flat tensor without token rows, or [T, 64, 256] (the query of a GLM-5 layer)
// with segments of 64 rows and both grids.
struct Case {
  DType dtype;
  int64_t bytes;
  bool grids;
  Isa isa;
};

void MeasureCase(const Case& c, const uint8_t* data, std::vector<Segment>* out) {
  const int64_t n = c.bytes * 8 / BitsOf(c.dtype);
  MeasureOptions options;
  options.isa = c.isa;
  LogicalLayout logical;
  Status status;
  if (c.grids) {
    const int64_t d = std::min<int64_t>(n, 256);
    const int64_t heads = std::clamp<int64_t>(n / 256, 1, 64);
    const int64_t shape[] = {n / (heads * d), heads, d};
    const int64_t strides[] = {heads * d, d, 1};
    const RowRun runs[] = {{1, 0, shape[0], 0, false}};
    logical.row_axis = 0;
    logical.head_axis = 1;
    logical.runs = runs;
    status = Measure({data, c.dtype, shape, strides, 0}, logical, options, out);
  } else {
    const int64_t stride = 1;
    status = Measure({data, c.dtype, {&n, 1}, {&stride, 1}, 0}, logical, options, out);
  }
  if (!status.ok()) {
    std::fprintf(stderr, "bench_stats: %s\n", status.message().c_str());
    std::exit(5);
  }
  g_sink = (*out)[0].stats.digest;
}

struct Timing {
  double measure_gbs;
  double read_gbs;
};

Timing Run(const Case& c, const uint8_t* data, int repeats) {
  std::vector<Segment> out;
  std::vector<double> measured;
  std::vector<double> read[3];
  const uint64_t* words = reinterpret_cast<const uint64_t*>(data);
  MeasureCase(c, data, &out);  // warm-up
  for (int k = 0; k < repeats; ++k) {
    read[0].push_back(TimeOf([&] { g_sink = ReadPlain(words, c.bytes / 8); }));
    read[1].push_back(TimeOf([&] { g_sink = ReadPrefetching(words, c.bytes / 8); }));
    read[2].push_back(TimeOf([&] { g_sink = ReadFourStreams(words, c.bytes / 8); }));
    measured.push_back(TimeOf([&] { MeasureCase(c, data, &out); }));
  }
  const double fastest = std::min({Median(read[0]), Median(read[1]), Median(read[2])});
  const double bytes = static_cast<double>(c.bytes);
  return {bytes / Median(measured) * 1e-9, bytes / fastest * 1e-9};
}

void WriteJson(const std::string& path, const std::vector<Result>& results) {
  std::FILE* f = std::fopen(path.c_str(), "w");
  if (!f) {
    std::fprintf(stderr, "bench_stats: cannot write %s\n", path.c_str());
    std::exit(4);
  }
  std::fprintf(f, "{\"schema\": \"assay.bench/1\", \"results\": [\n");
  for (size_t k = 0; k < results.size(); ++k) {
    const Result& r = results[k];
    std::fprintf(f,
                 "  {\"name\": \"%s\", \"value\": %.6g, \"unit\": \"%s\", \"baseline\": \"%s\", \"baseline_value\": "
                 "%.6g}%s\n",
                 r.name.c_str(), r.value, r.unit.c_str(), r.baseline.c_str(), r.baseline_value,
                 k + 1 < results.size() ? "," : "");
  }
  std::fprintf(f, "]}\n");
  std::fclose(f);
}

int Main(int argc, char** argv) {
  Options options;
  for (int a = 1; a < argc; ++a) {
    const std::string_view arg = argv[a];
    if (arg == "--json" && a + 1 < argc) {
      options.json = argv[++a];
    } else if (arg == "--max-mib" && a + 1 < argc) {
      options.max_mib = std::max(1, std::atoi(argv[++a]));
    } else if (arg == "--repeats" && a + 1 < argc) {
      options.repeats = std::max(1, std::atoi(argv[++a]));
    } else if (arg == "--dtype" && a + 1 < argc) {
      options.only = ParseDType(argv[++a]);
    } else if (arg == "--quick") {
      options.quick = true;
    } else {
      std::fprintf(stderr, "usage: bench_stats [--json FILE] [--max-mib N] [--repeats N] [--dtype NAME] [--quick]\n");
      return 2;
    }
  }
  const int64_t largest = options.max_mib << 20;
  std::vector<int64_t> sizes;
  for (int64_t bytes = 1024; bytes < largest && !options.quick; bytes *= 16) sizes.push_back(bytes);
  sizes.push_back(largest);
  const std::vector<DType> dtypes =
      options.quick ? std::vector<DType>{DType::kF32, DType::kBF16}
                    : std::vector<DType>{DType::kF32,      DType::kBF16,   DType::kF16, DType::kF64,
                                         DType::kF8E4M3FN, DType::kF8E5M2, DType::kI8,  DType::kI32};
  std::vector<Result> results;
  auto report = [&](const Case& c, const Buffer& buffer, const char* note) {
    const Timing t = Run(c, buffer.data(), options.repeats);
    const std::string name = "stats " + std::string(NameOf(c.dtype)) + " " + SizeName(c.bytes) +
                             (c.grids ? " grids " : " ") + NameOf(c.isa) + note;
    std::printf("%-46s %8.2f GB/s   read %8.2f GB/s   ratio %.3f   %.3f us\n", name.c_str(), t.measure_gbs, t.read_gbs,
                t.measure_gbs / t.read_gbs, static_cast<double>(c.bytes) / t.measure_gbs * 1e-3);
    std::fflush(stdout);
    results.push_back({name, t.measure_gbs, "GB/s", "fastest of three read loops", t.read_gbs});
  };
  for (DType dtype : dtypes) {
    if (options.only != DType::kInvalid && dtype != options.only) continue;
    for (Pages pages : {Pages::kHuge, Pages::kSmall}) {
      if (pages == Pages::kSmall && dtype != DType::kF32 && dtype != DType::kBF16) continue;
      const Buffer buffer(static_cast<size_t>(largest), pages);
      if (!buffer.data()) {
        std::fprintf(stderr, "bench_stats: no memory for %s\n", SizeName(largest).c_str());
        return 4;
      }
      Fill(buffer.data(), dtype, largest * 8 / BitsOf(dtype));
      if (pages == Pages::kSmall) {
        for (bool grids : {false, true}) report({dtype, largest, grids, ActiveIsa()}, buffer, " 4 KiB pages");
        continue;
      }
      for (int64_t bytes : sizes) {
        for (bool grids : {false, true}) report({dtype, bytes, grids, ActiveIsa()}, buffer, "");
      }
      // The other instruction sets, at one size beyond the caches.
      for (Isa isa : {Isa::kAvx512, Isa::kAvx2, Isa::kPortable}) {
        if (!options.quick && isa != ActiveIsa() && IsaUsable(isa)) {
          for (bool grids : {false, true})
            report({dtype, std::min<int64_t>(largest, 64 << 20), grids, isa}, buffer, "");
        }
      }
    }
  }
  if (!options.json.empty()) WriteJson(options.json, results);
  return 0;
}

}  // namespace
}  // namespace assay

int main(int argc, char** argv) { return assay::Main(argc, argv); }
