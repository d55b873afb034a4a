// Speed and memory of Diff, and speed of all checks, on traces far larger than a unit test's: generates two traces of
// small events (one decoded row each, statistics, sketch and row cell), reads both once so that their pages are warm,
// compares them, and checks one.
//   bench_diff [--json FILE] [--events N] [--runs N] [--dir FOLDER] [--keep]
// N counts both sides (default 10 M: about 6 GB in FOLDER, default $TMPDIR or /tmp; with less free space the count is
// lowered, and the result says so). The baseline is reading the same mapped bytes once.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "capture/capture.h"
#include "check/check.h"
#include "compare/diff.h"
#include "io/json.h"
#include "sites/site_table.h"
#include "trace/reader.h"
#include "trace/request_key.h"
#include "trace/writer.h"

namespace assay {
namespace {

constexpr int kLayers = 4;
constexpr int kRequests = 16;
constexpr int64_t kColumns = 256;
constexpr uint64_t kBytesPerEvent = 640;  // upper estimate, for the free-space check

double Seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Peak of this process's anonymous memory, sampled every 10 ms: VmHWM would count the mapped traces as well.
class AnonymousPeak {
 public:
  AnonymousPeak() : thread_([this] { Watch(); }) {}
  ~AnonymousPeak() {
    stop_ = true;
    thread_.join();
  }
  uint64_t bytes() const { return peak_; }

 private:
  static uint64_t Now() {
    std::ifstream status("/proc/self/status");
    std::string line;
    while (std::getline(status, line)) {
      if (line.rfind("RssAnon:", 0) == 0) return std::strtoull(line.c_str() + 8, nullptr, 10) * 1024;
    }
    return 0;
  }
  void Watch() {
    while (!stop_) {
      peak_ = std::max<uint64_t>(peak_, Now());
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> peak_{0};
  std::thread thread_;
};

// The sites of a materialised dense decoder, in order.
std::vector<std::string> SiteNames() {
  std::vector<std::string> names = {"embed"};
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    for (const SiteDef& def : AllSites()) {
      const std::string_view n = def.name;
      if (!def.per_layer || n.find(".J.") != std::string_view::npos || n.find("moe.") != std::string_view::npos ||
          def.paths == "absorbed" || n == "attn.k_proj" || n == "attn.v_proj") {
        continue;
      }
      names.push_back(FormatSiteName(layer, n));
    }
  }
  names.insert(names.end(), {"final_norm", "logits"});
  return names;
}

// noise: relative size of what distinguishes the rows of this side; 0 gives the plain values.
Status Generate(const std::string& dir, uint64_t events, double noise) {
  TraceWriterOptions options;
  options.dir = dir;
  options.byte_cap = uint64_t{1} << 40;
  ProcessInfo process;
  process.host = "bench";
  ASSAY_ASSIGN_OR_RETURN(std::unique_ptr<TraceWriter> writer, TraceWriter::Open(options, process));
  const std::vector<std::string> names = SiteNames();
  std::vector<uint32_t> sites;
  for (const std::string& name : names) {
    ASSAY_ASSIGN_OR_RETURN(const uint32_t id, writer->AddSite(name, "", "T h"));
    sites.push_back(id);
  }
  std::vector<uint64_t> keys;
  for (int64_t r = 0; r < kRequests; ++r) {
    const int64_t prompt[1] = {r};
    keys.push_back(RequestKey(prompt, 0));
    RequestInfo info;
    info.key = keys.back();
    info.prompt_tokens = 1;
    ASSAY_RETURN_IF_ERROR(writer->WriteRequest(info));
  }
  std::mt19937_64 values(1), disturbance(2);
  std::normal_distribution<float> normal;
  Event event;
  event.dtype = DType::kF32;
  event.phase = Phase::kDecode;
  event.shape = {1, kColumns};
  event.strides = {kColumns, 1};
  event.row_axis = 0;
  event.segments.resize(1);
  Segment& segment = event.segments[0];
  segment.n_rows = 1;
  segment.rows.resize(1);
  segment.stats.count = kColumns;
  segment.stats.min = -3;
  segment.stats.max = 3;
  segment.stats.abs_max = 3;
  segment.stats.histogram = {{-2, 12}, {-1, 30}, {0, 22}};
  segment.stats.histogram_samples = 64;
  // A row cell's sketch is the segment's folded to 4; with one row, both are drawn here and consistent in size.
  float pool[4096];
  for (float& x : pool) x = normal(values);
  uint64_t written = 0;
  for (uint64_t step = 0; written < events; ++step) {
    event.step = static_cast<int64_t>(step);
    segment.request = keys[step % kRequests];
    segment.first_position = static_cast<int64_t>(step / kRequests);
    for (size_t s = 0; s < sites.size() && written < events; ++s, ++written) {
      event.site = sites[s];
      const uint64_t at = values();
      RowCell& row = segment.rows[0];
      row.digest = at;
      row.sum_sq = 0;
      for (int k = 0; k < kSketchSize; ++k) {
        const double x = pool[(at + static_cast<uint64_t>(k) * 61) & 4095];
        segment.stats.sketch[static_cast<size_t>(k)] = x;
        row.sum_sq += x * x;
      }
      // Residual sums would not add up for drawn values; the judge then falls back to the general bound.
      for (size_t k = 0; k < kRowSketchSize; ++k) row.sketch[k] = segment.stats.sketch[k] * 4;
      if (noise > 0 && (at & 1) != 0) {
        for (size_t k = 0; k < kRowSketchSize; ++k) {
          row.sketch[k] += noise * normal(disturbance) * std::sqrt(row.sum_sq) / 2;
        }
        row.digest ^= 0x9e3779b97f4a7c15u;
      }
      segment.stats.digest = row.digest;
      segment.stats.sum_sq = row.sum_sq;
      ASSAY_RETURN_IF_ERROR(writer->Write(event));
    }
  }
  return writer->Close();
}

// Reads every byte of the folder's files through a mapping; gives seconds.
double ReadAll(const std::string& dir, uint64_t* bytes) {
  const double start = Seconds();
  uint64_t sum = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(dir)) {
    if (!entry.is_regular_file()) continue;
    const int fd = open(entry.path().c_str(), O_RDONLY);
    struct stat info {};
    if (fd >= 0 && fstat(fd, &info) == 0 && info.st_size > 0) {
      const auto size = static_cast<size_t>(info.st_size);
      void* mapped = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
      if (mapped != MAP_FAILED) {
        for (size_t i = 0; i + 8 <= size; i += 8) {
          uint64_t word;
          std::memcpy(&word, static_cast<const char*>(mapped) + i, 8);
          sum += word;
        }
        munmap(mapped, size);
        *bytes += size;
      }
    }
    if (fd >= 0) close(fd);
  }
  volatile uint64_t sink = sum;
  (void)sink;
  return Seconds() - start;
}

Json ResultOf(const std::string& name, double value, const char* unit, const std::string& baseline,
              double baseline_value) {
  Json j;
  j["name"] = name;
  j["value"] = value;
  j["unit"] = unit;
  j["baseline"] = baseline;
  j["baseline_value"] = baseline_value;
  return j;
}

int Run(int argc, char** argv) {
  std::string json, dir = std::getenv("TMPDIR") != nullptr ? std::getenv("TMPDIR") : "/tmp";
  uint64_t events = 10'000'000;
  int runs = 3;
  bool keep = false;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : "";
    if (option == "--keep") {
      keep = true;
      continue;
    }
    if (option == "--json") {
      json = value;
    } else if (option == "--events") {
      events = std::strtoull(value, nullptr, 10);
    } else if (option == "--runs") {
      runs = std::max(1, std::atoi(value));
    } else if (option == "--dir") {
      dir = value;
    } else {
      std::fprintf(stderr, "bench_diff: unknown option %s\n", option.c_str());
      return 2;
    }
    ++i;
  }
  const uint64_t free_bytes = std::filesystem::space(dir).available;
  if (events * kBytesPerEvent > free_bytes / 10 * 9) {
    events = free_bytes / 10 * 9 / kBytesPerEvent;
    std::fprintf(stderr, "bench_diff: %s has %.1f GB free, only %.1f M events\n", dir.c_str(),
                 static_cast<double>(free_bytes) / 1e9, static_cast<double>(events) / 1e6);
  }
  const std::string folder = dir + "/assay_bench_diff_" + std::to_string(getpid());
  const std::string a = folder + "/a", b = folder + "/b";
  const double start = Seconds();
  for (const auto& [path, noise] : {std::pair(a, 0.0), std::pair(b, 1e-8)}) {
    if (const Status status = Generate(path, events / 2, noise); !status.ok()) {
      std::fprintf(stderr, "bench_diff: %s\n", status.message().c_str());
      return static_cast<int>(status.code());
    }
  }
  std::fprintf(stderr, "bench_diff: %.1f M events generated in %.1f s\n", static_cast<double>(events) / 1e6,
               Seconds() - start);

  std::vector<double> seconds, open_seconds, check_seconds, read_seconds, read_one_seconds;
  uint64_t peak = 0, bytes = 0;
  std::string summary;
  for (int r = 0; r < runs; ++r) {
    bytes = 0;
    ReadAll(a, &bytes);  // warm
    bytes = 0;
    read_one_seconds.push_back(ReadAll(a, &bytes));
    read_seconds.push_back(read_one_seconds.back() + ReadAll(b, &bytes));
    AnonymousPeak watch;
    const double begin = Seconds();
    auto trace_a = Trace::Open(a), trace_b = Trace::Open(b);
    if (!trace_a.ok() || !trace_b.ok()) {
      std::fprintf(stderr, "bench_diff: %s%s\n", trace_a.status().message().c_str(),
                   trace_b.status().message().c_str());
      return 3;
    }
    open_seconds.push_back(Seconds() - begin);
    auto result = Diff(**trace_a, **trace_b, DiffOptions());
    if (!result.ok()) {
      std::fprintf(stderr, "bench_diff: %s\n", result.status().message().c_str());
      return 3;
    }
    seconds.push_back(Seconds() - begin);
    peak = std::max(peak, watch.bytes());
    summary = result->summary;
    if (result->verdict != Verdict::kNoise || result->coverage.rows_compared != events / 2) {
      std::fprintf(stderr, "bench_diff: expected noise in %llu rows, got %s\n",
                   static_cast<unsigned long long>(events / 2), summary.c_str());
      return 5;
    }
  }
  for (int r = 0; r < runs; ++r) {
    const double begin = Seconds();
    auto capture = Capture::Open(a);
    const auto result = capture.ok() ? RunChecks(**capture, CheckOptions()) : Result<CheckResult>(capture.status());
    check_seconds.push_back(Seconds() - begin);
    if (!result.ok() || result->coverage.events != events / 2) {
      std::fprintf(stderr, "bench_diff: the checks did not see all events\n");
      return 5;
    }
  }
  if (!keep) std::filesystem::remove_all(folder);
  auto median = [](std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
  };
  const std::string count = std::to_string(events / 1000) + " k events";
  const std::string of_runs = ", median of " + std::to_string(runs);
  Json j;
  j["schema"] = "assay.bench/1";
  j["results"] = Json::array();
  j["results"].push_back(ResultOf("diff: open and compare, " + count + of_runs, median(seconds), "s",
                                  "read the same mapped bytes once", median(read_seconds)));
  j["results"].push_back(ResultOf("diff: open alone, " + count + of_runs, median(open_seconds), "s",
                                  "read the same mapped bytes once", median(read_seconds)));
  j["results"].push_back(ResultOf("diff: peak anonymous memory, " + count + ", largest of " + std::to_string(runs),
                                  static_cast<double>(peak) / (1 << 20), "MiB", "trace files",
                                  static_cast<double>(bytes) / (1 << 20)));
  j["results"].push_back(ResultOf("check: open and judge, " + std::to_string(events / 2000) + " k events" + of_runs,
                                  median(check_seconds), "s", "read the same mapped bytes once",
                                  median(read_one_seconds)));
  for (const Json& result : j["results"]) std::printf("%s\n", WriteJson(result, -1).c_str());
  if (!json.empty()) std::ofstream(json) << WriteJson(j) << "\n";
  return 0;
}

}  // namespace
}  // namespace assay

int main(int argc, char** argv) { return assay::Run(argc, argv); }
