// Cost of a probe through the C interface: off, and on at each level, for small tensors.
//
//   bench_record [--json FILE] [--events N] [--repeats N]
//
// Every figure is nanoseconds a call, the median of --repeats (9) timings of --events (4000) calls each, in processor
// time of one thread. The baseline of "off" is the same loop without the probe; of "on" it is a copy of the tensor's
// bytes, timed in turn with the calls. Of a decode step (below) the figures are nanoseconds a segment, in wall time.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <string>
#include <vector>

#include "assay/assay.h"
#include "base/json_writer.h"

namespace {

struct Options {
  std::string json;
  int64_t events = 4000;
  int repeats = 9;
};

struct Row {
  std::string name;
  double value;
  std::string baseline;
  double baseline_value;
};

double Now() {
  std::timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e9 + static_cast<double>(t.tv_nsec);
}

double Median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

// Nanoseconds a call of both, timed in turn.
template <class F, class G>
Row Compare(const Options& options, const std::string& name, int64_t calls, F&& call, const std::string& baseline,
            G&& base) {
  std::vector<double> values, bases;
  for (int r = 0; r < options.repeats + 1; ++r) {
    double begin = Now();
    for (int64_t i = 0; i < calls; ++i) call();
    const double value = (Now() - begin) / static_cast<double>(calls);
    begin = Now();
    for (int64_t i = 0; i < calls; ++i) base();
    const double plain = (Now() - begin) / static_cast<double>(calls);
    if (r == 0) continue;  // first touch of the mapping and the caches
    values.push_back(value);
    bases.push_back(plain);
  }
  const Row row{name, Median(values), baseline, Median(bases)};
  std::printf("%-44s %10.1f ns   %s %.1f ns\n", row.name.c_str(), row.value, row.baseline.c_str(), row.baseline_value);
  return row;
}

assay_trace* Open(const std::string& folder, const char* level) {
  const std::string dir = "ASSAY_DIR=" + folder + "/trace-" + level, at_level = std::string("ASSAY_LEVEL=") + level;
  const char* settings[] = {"ASSAY=all", dir.c_str(), at_level.c_str()};
  assay_options options = assay_options_init();
  options.settings = settings;
  options.n_settings = 3;
  options.flags = ASSAY_OPEN_NO_ENVIRONMENT;
  assay_trace* trace = nullptr;
  assay_error error;
  if (assay_open(&options, &trace, &error) != ASSAY_OK) {
    std::fprintf(stderr, "bench_record: %s\n", error.message);
    std::exit(4);
  }
  return trace;
}

std::vector<Row> Measure(const Options& options, const std::string& folder) {
  std::vector<Row> rows;
  // The compiler may not know whether the probe is armed, nor drop the loop without one.
  assay_trace* off = nullptr;
  assay_open(nullptr, &off, nullptr);
  assay_event event = assay_event_init();
  const auto barrier = [] { asm volatile("" ::: "memory"); };
  rows.push_back(Compare(
      options, "record off", options.events * 1000,
      [&] {
        barrier();
        if (assay_armed(off) != 0) assay_record(off, &event, nullptr);
      },
      "the loop alone", barrier));
  assay_close(&off, nullptr);

  struct Case {
    const char* level;
    int64_t tokens, heads, dim;
  };
  for (const Case& c : {Case{"names", 1, 8, 64}, Case{"shapes", 1, 8, 64}, Case{"stats", 1, 1, 64},
                        Case{"stats", 1, 8, 64}, Case{"stats", 16, 8, 64}, Case{"payload", 1, 8, 64}}) {
    assay_trace* trace = Open(folder, c.level);
    std::vector<float> values(static_cast<size_t>(c.tokens * c.heads * c.dim)), copy(values.size());
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 97) - 48.0f;
    const int64_t shape[] = {c.tokens, c.heads, c.dim};
    assay_site_info info = assay_site_info_init();
    info.name = "layers.0.attn.q";
    uint32_t site = 0;
    assay_add_site(trace, &info, &site, nullptr);
    assay_row_run run = {42, 0, c.tokens, 0, 0, 0};
    event = assay_event_init();
    event.site = site;
    event.data = values.data();
    event.dtype = ASSAY_DTYPE_F32;
    event.ndim = 3;
    event.shape = shape;
    event.runs = &run;
    event.n_runs = 1;
    int64_t failed = 0;
    rows.push_back(Compare(
        options,
        std::string("record ") + c.level + " f32 [" + std::to_string(c.tokens) + ", " + std::to_string(c.heads) + ", " +
            std::to_string(c.dim) + "]",
        options.events,
        [&] {
          if (assay_armed(trace) != 0) failed += assay_record(trace, &event, nullptr) != ASSAY_OK;
        },
        "memcpy of the tensor",
        [&] {
          std::memcpy(copy.data(), values.data(), values.size() * sizeof(float));
          barrier();
        }));
    if (failed != 0) std::fprintf(stderr, "bench_record: %ld records failed\n", static_cast<long>(failed));
    assay_close(&trace, nullptr);
    std::filesystem::remove_all(folder + "/trace-" + c.level);
  }
  return rows;
}

// --- A decode step ---------------------------------------------------------------------------------------------------
//
// What an engine with small tensors does: many events a step, one row of each request in each, half of them cut out of
// wider rows and with heads. Between two events the host runs its own kernels: `cold` reads 4 MiB of other memory
// there, and each tensor is written just before it is recorded.

struct StepTensor {
  int64_t heads, dim;   // heads 1: no head axis
  int64_t head_stride;  // elements; dim when heads is 1
  uint32_t site = 0;
  std::vector<uint16_t> values = {};  // bf16
};

constexpr int kStepEvents = 60;
constexpr int kSteps = 24;  // of a repeat
constexpr size_t kOtherBytes = size_t{4} << 20;

double Wall() {
  std::timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) * 1e9 + static_cast<double>(t.tv_nsec);
}

// Two rows: without the events that grew the file (the sum of each event's median), and all of them (the mean).
void MeasureStep(const Options& options, const std::string& folder, int64_t requests, bool cold,
                 std::vector<Row>* rows) {
  assay_trace* trace = Open(folder, "stats");
  std::vector<StepTensor> tensors = {{1, 1024, 1024}, {8, 48, 112}, {1, 512, 512}, {8, 64, 64},
                                     {1, 32, 32},     {8, 32, 96},  {1, 256, 256}, {8, 64, 112}};
  uint64_t random = 1;
  for (size_t k = 0; k < tensors.size(); ++k) {
    StepTensor& t = tensors[k];
    t.values.resize(static_cast<size_t>(requests * t.heads * t.head_stride));
    for (uint16_t& value : t.values) {  // both signs, exponents -6 to 1
      random = random * 6364136223846793005u + 1442695040888963407u;
      value = static_cast<uint16_t>((random >> 63) << 15 | (121 + (random >> 40) % 8) << 7 | (random >> 50) % 128);
    }
    assay_site_info info = assay_site_info_init();
    const std::string name = "layers." + std::to_string(k) + (t.heads > 1 ? ".attn.q" : ".ffn.out");
    info.name = name.c_str();
    info.axes = t.heads > 1 ? "T H d" : "T c";
    assay_add_site(trace, &info, &t.site, nullptr);
  }
  std::vector<assay_row_run> runs;
  for (int64_t r = 0; r < requests; ++r) runs.push_back({static_cast<uint64_t>(1000 + r), r, 1, 100 + 7 * r, 0, 0});

  std::vector<unsigned char> other(kOtherBytes, 1), copy(size_t{1} << 16);
  uint64_t sink = 0;
  int64_t failed = 0;
  const auto disturb = [&] {
    for (size_t at = 0; cold && at < other.size(); at += 64) sink += other[at];
  };
  std::vector<std::vector<double>> calls(kStepEvents), copies(kStepEvents);
  std::vector<double> means;
  for (int r = 0; r < options.repeats; ++r) {
    double total = 0;
    for (int step = 0; step < kSteps; ++step) {
      for (int e = 0; e < kStepEvents; ++e) {
        StepTensor& t = tensors[static_cast<size_t>(e) % tensors.size()];
        const int64_t shape[] = {requests, t.heads, t.dim}, strides[] = {t.heads * t.head_stride, t.head_stride, 1};
        const int64_t flat_shape[] = {requests, t.dim}, flat_strides[] = {t.dim, 1};
        assay_event event = assay_event_init();
        event.site = t.site;
        event.step = step;
        event.data = t.values.data();
        event.dtype = ASSAY_DTYPE_BF16;
        event.ndim = t.heads > 1 ? 3 : 2;
        event.shape = t.heads > 1 ? shape : flat_shape;
        event.strides = t.heads > 1 ? strides : flat_strides;
        event.runs = runs.data();
        event.n_runs = runs.size();
        for (const bool record : {true, false}) {
          disturb();
          for (uint16_t& value : t.values) value = static_cast<uint16_t>(value ^ 0x8000);
          const double begin = Wall();
          if (record) {
            failed += assay_record(trace, &event, nullptr) != ASSAY_OK;
          } else {
            unsigned char* to = copy.data();
            for (int64_t k = 0; k < requests * t.heads; ++k, to += 2 * t.dim) {
              std::memcpy(to, t.values.data() + k * t.head_stride, static_cast<size_t>(2 * t.dim));
            }
            asm volatile("" : : "r"(copy.data()) : "memory");
          }
          const double took = Wall() - begin;
          (record ? calls : copies)[static_cast<size_t>(e)].push_back(took);
          if (record) total += took;
        }
      }
    }
    means.push_back(total);
  }
  if (failed != 0 || sink == 1) std::fprintf(stderr, "bench_record: %ld records failed\n", static_cast<long>(failed));
  assay_close(&trace, nullptr);
  std::filesystem::remove_all(folder + "/trace-stats");

  const auto segments = static_cast<double>(kStepEvents * requests);
  double call = 0, plain = 0;
  for (int e = 0; e < kStepEvents; ++e) {
    call += Median(calls[static_cast<size_t>(e)]) / segments;
    plain += Median(copies[static_cast<size_t>(e)]) / segments;
  }
  const std::string name = "decode " + std::to_string(requests) + (requests == 1 ? " request " : " requests ") +
                           (cold ? "cold" : "warm") + ", a segment";
  for (const Row& row : {Row{name, call, "memcpy of the row", plain},
                         Row{name + " with growth", Median(means) / kSteps / segments, "memcpy of the row", plain}}) {
    std::printf("%-44s %10.1f ns   %s %.1f ns\n", row.name.c_str(), row.value, row.baseline.c_str(),
                row.baseline_value);
    rows->push_back(row);
  }
}

bool WriteJson(const std::string& file, const std::vector<Row>& rows) {
  assay::JsonWriter json;
  json.BeginObject();
  json.Key("schema"), json.String("assay.bench/1");
  json.Key("results"), json.BeginArray();
  for (const Row& row : rows) {
    json.BeginObject();
    json.Key("name"), json.String(row.name);
    json.Key("value"), json.Double(row.value);
    json.Key("unit"), json.String("ns");
    json.Key("baseline"), json.String(row.baseline);
    json.Key("baseline_value"), json.Double(row.baseline_value);
    json.EndObject();
  }
  json.EndArray();
  json.EndObject();
  std::FILE* out = std::fopen(file.c_str(), "w");
  if (out == nullptr) return false;
  const std::string text = json.text() + "\n";
  const bool written = std::fwrite(text.data(), 1, text.size(), out) == text.size();
  return std::fclose(out) == 0 && written;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--json") options.json = argv[i + 1];
    if (name == "--events") options.events = std::atoll(argv[i + 1]);
    if (name == "--repeats") options.repeats = std::atoi(argv[i + 1]);
  }
  if (options.events < 1 || options.repeats < 1) return 2;
  char folder[] = "/tmp/assay-bench-record-XXXXXX";
  if (mkdtemp(folder) == nullptr) return 4;
  std::vector<Row> rows = Measure(options, folder);
  for (const int64_t requests : {1, 8}) {
    for (const bool cold : {false, true}) MeasureStep(options, folder, requests, cold, &rows);
  }
  std::filesystem::remove_all(folder);
  if (!options.json.empty() && !WriteJson(options.json, rows)) {
    std::fprintf(stderr, "bench_record: cannot write %s\n", options.json.c_str());
    return 4;
  }
  return 0;
}
