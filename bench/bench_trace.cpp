// Trace write and read rates beside a plain copy of the same bytes.
//
//   bench_trace [--json FILE] [--repeats N] [--events N] [--dir DIR]
//
// Every figure is the median of --repeats (9) timings of one thread's processor time, kernel included; measurement and
// baseline take turns. The events are given: 1000 of a [1, 256] bf16 tensor with row grid, in turn. DIR (default: the
// folder for temporary files) decides which file system is measured. Files are warm: nothing waits for a disk.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/files.h"
#include "base/hash.h"
#include "base/mapped_file.h"
#include "trace/codec.h"
#include "trace/reader.h"
#include "trace/writer.h"

namespace assay {
namespace {

struct Options {
  std::string json;
  int repeats = 9;
  int64_t events = 200000;
  std::string dir = std::filesystem::temp_directory_path() / "assay-bench-trace";
};

struct BenchResult {
  std::string name;
  double value;
  std::string unit;
  std::string baseline;
  double baseline_value;
};

double Now() {
  std::timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

double Median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "bench_trace: %s\n", what.c_str());
  std::exit(4);
}

std::vector<Event> GivenEvents() {
  std::vector<Event> events(1000);
  SplitMix64 random(1);
  for (Event& e : events) {
    e.step = static_cast<int64_t>(random.Next() % 1000);
    e.phase = Phase::kDecode;
    e.dtype = e.compute_dtype = DType::kBF16;
    e.shape = {1, 256};
    e.strides = {256, 1};
    e.row_axis = 0;
    Segment s;
    s.request = random.Next();
    s.n_rows = 1;
    s.stats.count = 256;
    s.stats.sum_sq = random.NextDouble();
    s.stats.digest = random.Next();
    for (double& x : s.stats.sketch) x = random.NextDouble() - 0.5;
    s.stats.histogram_samples = 256;
    for (int16_t exponent = -9; exponent <= 1; ++exponent) s.stats.histogram.push_back({exponent, 23});
    RowCell row;
    row.sum_sq = s.stats.sum_sq;
    row.digest = random.Next();
    for (double& x : row.sketch) x = random.NextDouble() - 0.5;
    s.rows.push_back(row);
    e.segments.push_back(std::move(s));
  }
  return events;
}

// Seconds to write the events into a fresh trace; the file stays.
double WriteTrace(const Options& options, const std::vector<Event>& events, uint64_t reserved, std::string* path) {
  TraceWriterOptions writer_options;
  writer_options.dir = options.dir;
  writer_options.manifest = false;
  if (reserved > 0) writer_options.reserve_step = writer_options.ready_step = reserved;
  Result<std::unique_ptr<TraceWriter>> writer = TraceWriter::Open(writer_options, {});
  if (!writer.ok()) Die(writer.status().message());
  if (!writer.value()->AddSite("layers.0.attn.out", "", "T H dv").ok()) Die("no site");
  const double start = Now();
  for (int64_t i = 0; i < options.events; ++i) {
    if (!writer.value()->Write(events[static_cast<size_t>(i) % events.size()]).ok()) Die("event dropped");
  }
  const double seconds = Now() - start;
  *path = writer.value()->path();
  if (!writer.value()->Close().ok()) Die("cannot close");
  return seconds;
}

// Seconds to copy the records, one memcpy each, into memory that is mapped from a file and present.
double CopyToReadyMapping(const Options& options, const std::vector<unsigned char>& record) {
  const std::string path = options.dir + "/copy";
  const size_t size_bytes = record.size() * static_cast<size_t>(options.events);
  const FileDescriptor fd(::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600));
  if (!fd.valid() || ::ftruncate(fd.get(), static_cast<off_t>(size_bytes)) != 0) Die("cannot make " + path);
  auto* out = static_cast<unsigned char*>(::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0));
  if (out == MAP_FAILED) Die("cannot map " + path);
  for (size_t at = 0; at < size_bytes; at += 4096) out[at] = 1;
  const double start = Now();
  for (int64_t i = 0; i < options.events; ++i) {
    std::memcpy(out + record.size() * static_cast<size_t>(i), record.data(), record.size());
  }
  const double seconds = Now() - start;
  ::munmap(out, size_bytes);
  ::unlink(path.c_str());
  return seconds;
}

// Seconds to write the same bytes into a new file by write(2), 256 KiB a call.
double CopyByWrite(const Options& options, const std::vector<unsigned char>& record) {
  const std::string path = options.dir + "/copy";
  const size_t per_call = 256 * 1024 / record.size();
  std::vector<unsigned char> buffer(record.size() * per_call);
  const FileDescriptor fd(::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600));
  if (!fd.valid()) Die("cannot make " + path);
  const double start = Now();
  for (int64_t i = 0; i < options.events;) {
    const auto n = static_cast<size_t>(std::min<int64_t>(static_cast<int64_t>(per_call), options.events - i));
    for (size_t k = 0; k < n; ++k) std::memcpy(buffer.data() + k * record.size(), record.data(), record.size());
    if (WriteAll(fd.get(), buffer.data(), n * record.size()) != 0) Die("cannot write " + path);
    i += static_cast<int64_t>(n);
  }
  const double seconds = Now() - start;
  ::unlink(path.c_str());
  return seconds;
}

// Seconds to map the file and add up its words.
double ReadPlainly(const std::string& path, uint64_t* sink) {
  const double start = Now();
  const Result<MappedFile> file = MappedFile::Open(path);
  if (!file.ok()) Die(file.status().message());
  const auto bytes = file.value().bytes();
  for (size_t at = 0; at + 8 <= bytes.size(); at += 8) {
    uint64_t word;
    std::memcpy(&word, bytes.data() + at, 8);
    *sink += word;
  }
  return Now() - start;
}

std::vector<BenchResult> Run(const Options& options) {
  const std::vector<Event> events = GivenEvents();
  const Result<uint32_t> record_bytes = codec::EventSize(events[0]);
  if (!record_bytes.ok()) Die(record_bytes.status().message());
  const std::vector<unsigned char> record(record_bytes.value(), 0x5a);
  const uint64_t reserved = record.size() * static_cast<uint64_t>(options.events) + (uint64_t{1} << 20);

  std::vector<double> write_reserved, copy_mapped, write_sustained, copy_write, open, read_plain, visit;
  uint64_t sink = 0;
  double sum = 0;
  for (int repeat = 0; repeat < options.repeats; ++repeat) {
    std::string path;
    write_reserved.push_back(WriteTrace(options, events, reserved, &path));
    ::unlink(path.c_str());
    copy_mapped.push_back(CopyToReadyMapping(options, record));
    write_sustained.push_back(WriteTrace(options, events, 0, &path));
    copy_write.push_back(CopyByWrite(options, record));

    read_plain.push_back(ReadPlainly(path, &sink));
    double start = Now();
    Result<std::unique_ptr<Trace>> trace = Trace::Open(path);
    open.push_back(Now() - start);
    if (!trace.ok()) Die(trace.status().message());
    if (trace.value()->event_count() != static_cast<uint64_t>(options.events)) Die("events are missing");
    start = Now();
    for (uint64_t i = 0; i < trace.value()->event_count(); ++i) sum += trace.value()->event(i).segment(0).sum_sq;
    visit.push_back(Now() - start);
    ::unlink(path.c_str());
  }
  if (sink == 1 || sum < 0) std::fprintf(stderr, "%g\n", sum);  // keeps the loops

  const auto n = static_cast<double>(options.events);
  const auto rate = [&](std::vector<double> seconds) { return n / Median(std::move(seconds)); };
  const auto ns = [&](std::vector<double> seconds) { return Median(std::move(seconds)) / n * 1e9; };
  return {
      {"trace.write.reserved", rate(write_reserved), "events/s", "memcpy into a present mapping", rate(copy_mapped)},
      {"trace.write.sustained", rate(write_sustained), "events/s", "write(2) of the same bytes", rate(copy_write)},
      {"trace.event.size", static_cast<double>(record.size()), "bytes", "limit for small events", 700},
      {"trace.open", ns(open), "ns/event", "adding up the file's words", ns(read_plain)},
      {"trace.visit", ns(visit), "ns/event", "adding up the file's words", ns(read_plain)},
  };
}

bool WriteJsonFile(const std::string& path, const std::vector<BenchResult>& results) {
  std::FILE* out = std::fopen(path.c_str(), "w");
  if (out == nullptr) return false;
  std::fprintf(out, "{\"schema\": \"assay.bench/1\", \"results\": [");
  for (size_t i = 0; i < results.size(); ++i) {
    const BenchResult& r = results[i];
    std::fprintf(
        out,
        "%s\n  {\"name\": \"%s\", \"value\": %.6g, \"unit\": \"%s\", \"baseline\": \"%s\", \"baseline_value\": "
        "%.6g}",
        i > 0 ? "," : "", r.name.c_str(), r.value, r.unit.c_str(), r.baseline.c_str(), r.baseline_value);
  }
  std::fprintf(out, "\n]}\n");
  return std::fclose(out) == 0;
}

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view name = argv[i];
    if (name == "--json") {
      options.json = argv[i + 1];
    } else if (name == "--repeats") {
      options.repeats = std::atoi(argv[i + 1]);
    } else if (name == "--events") {
      options.events = std::atoll(argv[i + 1]);
    } else if (name == "--dir") {
      options.dir = argv[i + 1];
    } else {
      std::fprintf(stderr, "usage: bench_trace [--json FILE] [--repeats N] [--events N] [--dir DIR]\n");
      return 2;
    }
  }
  if (!MakeDirs(options.dir).ok()) Die("cannot make " + options.dir);
  const std::vector<BenchResult> results = Run(options);
  for (const BenchResult& r : results) {
    std::printf("%-24s %12.4g %-9s  %s: %.4g\n", r.name.c_str(), r.value, r.unit.c_str(), r.baseline.c_str(),
                r.baseline_value);
  }
  if (!options.json.empty() && !WriteJsonFile(options.json, results)) Die("cannot write " + options.json);
  return 0;
}

}  // namespace
}  // namespace assay

int main(int argc, char** argv) { return assay::Main(argc, argv); }
