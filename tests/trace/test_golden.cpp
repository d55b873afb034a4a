// Files of format version 1 as they were written once must read the same for ever: tests/golden/trace-v1 holds a good
// file and damaged variants named for their fault, each with the report that reading it must give (NAME.expected).
//
// ASSAY_UPDATE_GOLDEN=1 rewrites the reports from what is read now; ASSAY_WRITE_GOLDEN=1 makes the trace files anew,
// which only a new format version may need (then in a new folder; the old ones stay).
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>

#include "trace_bytes.h"

namespace assay {
namespace {

using namespace testing;  // NOLINT

const char kFolder[] = ASSAY_SOURCE_DIR "/tests/golden/trace-v1";

std::string Line(const char* format, auto... values) {
  char buffer[512];
  std::snprintf(buffer, sizeof buffer, format, values...);
  return buffer;
}

using Ull = unsigned long long;  // NOLINT: for printf

// Everything that a reader of the file sees, as text.
std::string ReportOf(const Bytes& bytes) {
  const Result<std::unique_ptr<Trace>> result = Trace::FromBytes(bytes, "golden.assay");
  if (!result.ok()) return "refused: " + result.status().message() + "\n";
  const Trace& trace = *result.value();
  std::string out;
  for (const Damage& d : trace.damages()) {
    out += Line("%s at %llu, %llu bytes: %s\n", d.benign ? "benign" : "damage", Ull{d.offset}, Ull{d.size_bytes},
                d.what.c_str());
  }
  const TraceProcess& p = trace.processes()[0];
  out += Line("process %s pid %lld rank %d of %d, closed %d, dropped %llu\n", p.info.host.c_str(),
              static_cast<long long>(p.info.pid), p.info.rank, p.info.world_size, p.closed, Ull{p.drops.total()});
  for (const std::string& word : p.info.command) out += "command " + word + "\n";
  for (const auto& [key, value] : p.info.meta) out += "meta " + key + "=" + value + "\n";
  for (const SiteInfo& s : p.sites)
    out += Line("site %u %s|%s|%s\n", s.id, s.name.c_str(), s.engine_name.c_str(), s.axes.c_str());
  for (const RequestInfo& r : p.requests) {
    out += Line("request %016llx prompt %lld ordinal %lld tokens %zu\n", Ull{r.key},
                static_cast<long long>(r.prompt_tokens), static_cast<long long>(r.ordinal), r.tokens.size());
  }
  for (const CoverageNote& c : p.coverage) {
    out += Line("coverage %s: %s %llu %s\n", c.site.c_str(), c.reason.c_str(), Ull{c.count}, c.detail.c_str());
  }
  for (uint64_t i = 0; i < trace.event_count(); ++i) {
    const Event e = trace.event(i).Decode();
    out += Line("event %llu time %llu site %u rank %d step %lld %s %s/%s flags %u stream %llu base %llx\n",
                Ull{e.sequence}, Ull{e.time_ns}, e.site, e.rank, static_cast<long long>(e.step),
                std::string(NameOf(e.phase)).c_str(), std::string(NameOf(e.dtype)).c_str(),
                std::string(NameOf(e.compute_dtype)).c_str(), e.flags, Ull{e.stream}, Ull{e.base_address});
    for (size_t a = 0; a < e.shape.size(); ++a) {
      out +=
          Line("  axis %lld stride %lld\n", static_cast<long long>(e.shape[a]), static_cast<long long>(e.strides[a]));
    }
    out += Line("  shard %d/%d at %lld of %lld, payload %s\n", e.shard.index, e.shard.count,
                static_cast<long long>(e.shard.col_offset), static_cast<long long>(e.shard.full_cols),
                e.payload.sha256.c_str());
    for (const auto& [key, value] : e.meta) out += "  meta " + key + "=" + value + "\n";
    for (const Segment& s : e.segments) {
      out += Line(
          "  segment %016llx at %lld, %lld rows, padding %d: count %llu nan %llu +inf %llu -inf %llu zero %llu "
          "subnormal %llu\n",
          Ull{s.request}, static_cast<long long>(s.first_position), static_cast<long long>(s.n_rows), s.padding,
          Ull{s.stats.count}, Ull{s.stats.nan}, Ull{s.stats.pos_inf}, Ull{s.stats.neg_inf}, Ull{s.stats.zero},
          Ull{s.stats.subnormal});
      out += Line("    min %a max %a abs_max %a at %llu sum %a sum_sq %a digest %016llx split %d\n", s.stats.min,
                  s.stats.max, s.stats.abs_max, Ull{s.stats.abs_max_index}, s.stats.sum, s.stats.sum_sq,
                  Ull{s.stats.digest}, s.stats.digest_split);
      out += Line("    sketch %a %a … %a, %zu bins, %llu samples\n", s.stats.sketch[0], s.stats.sketch[1],
                  s.stats.sketch[63], s.stats.histogram.size(), Ull{s.stats.histogram_samples});
      for (const RowCell& row : s.rows) {
        out += Line("    row %a %a %016llx %u\n", row.sum_sq, row.sketch[3], Ull{row.digest}, row.nonfinite);
      }
      for (const HeadCell& head : s.heads)
        out += Line("    head %a %a %u\n", head.sum_sq, head.sketch[15], head.nonfinite);
    }
  }
  return out;
}

Bytes GoodFile() {
  const TempDir dir;
  TraceWriterOptions options;
  options.dir = dir.path();
  options.reserve_step = 64 << 10;
  ProcessInfo process = SomeProcess();
  process.pid = 4242;
  process.start_time_ns = 1700000000000000000;
  auto writer = std::move(TraceWriter::Open(options, process)).value();
  EXPECT_TRUE(writer->WriteRequest({77, 5, 1, "req-1", {1, 2, 3, 4, 5}}).ok());
  for (uint64_t i = 0; i < 6; ++i) {
    Event e = SomeEvent(i, 1 + static_cast<int64_t>(i), 24, static_cast<int>(i % 3));
    e.time_ns = 1700000000000000000 + i;
    e.site = writer->AddSite("layers." + std::to_string(i / 2) + ".attn.q", "engine.q", "T H d").value();
    EXPECT_TRUE(writer->Write(e).ok());
  }
  Event e = SomeEvent(6, 70, 8, 1);
  e.time_ns = 1700000000000000006;
  e.site = writer->AddSite("logits", "", "T vocab").value();
  e.shape = {70, 2, 4};
  e.strides = {-16, 0, 1};
  e.storage_offset = 1104;
  e.stream = 9;
  e.flags = kEventInGraph;
  e.shard = {1, 2, 8, 16};
  e.meta = {{"kv_scale", "0.5"}};
  e.payload = {std::string(64, '0'), 560, {3, 69}};
  Stats& s = e.segments[1].stats;
  s.nan = 1, s.pos_inf = 2, s.neg_inf = 3, s.subnormal = 4;
  s.digest_split = true;
  s.histogram[2].count = 100000;
  s.sketch[0] = 1e38;
  e.segments[1].padding = true;
  EXPECT_TRUE(writer->Write(e).ok());
  EXPECT_TRUE(writer->WriteCoverage({"layers.9.attn.q", "never fired", 0, ""}).ok());
  EXPECT_TRUE(writer->WriteProcessMeta("dtype", "f32").ok());
  EXPECT_TRUE(writer->Close().ok());
  return ReadBytes(writer->path());
}

// Every variant is made from the good file by its fault.
std::vector<std::pair<std::string, std::function<void(Bytes*)>>> Faults() {
  const auto open = [](Bytes* b) { Poke<uint64_t>(b, format::kLiveOffset + offsetof(format::LiveArea, closed), 0); };
  const auto event = [](const Bytes& b, int n) {
    for (const RecordSpan& r : RecordsOf(b)) {
      if (r.kind == format::kKindEvent && n-- == 0) return r;
    }
    return RecordSpan{};
  };
  const auto unknown_kind = [event](Bytes* b) {
    const uint64_t at = event(*b, 1).offset;
    Poke<uint16_t>(b, at + 12, 37);
    Reseal(b, at);
  };
  return {
      {"good", [](Bytes*) {}},
      {"torn-tail", [open](Bytes* b) { open(b), b->resize(b->size() - 300); }},
      {"killed-writer", [open](Bytes* b) { open(b), b->resize(b->size() + 5000); }},
      {"cut-after-close", [](Bytes* b) { b->resize(b->size() - 300); }},
      {"flipped-byte", [event](Bytes* b) { (*b)[event(*b, 2).offset + 100] ^= 8; }},
      {"flipped-length", [event](Bytes* b) { (*b)[event(*b, 2).offset + 5] ^= 1; }},
      {"reserved-hole", [event](Bytes* b) { Poke(b, event(*b, 3).offset, format::kTagReserved); }},
      {"zero-hole", [event](Bytes* b) { std::memset(b->data() + event(*b, 3).offset, 0, event(*b, 3).size_bytes); }},
      {"unknown-kind", unknown_kind},
      {"unknown-kind-of-newer-minor",
       [unknown_kind](Bytes* b) {
         unknown_kind(b);
         Poke<uint16_t>(b, offsetof(format::FileHeader, minor), 5), ResealHeader(b);
       }},
      {"newer-major", [](Bytes* b) { Poke<uint16_t>(b, offsetof(format::FileHeader, major), 2), ResealHeader(b); }},
      {"unknown-required-feature",
       [](Bytes* b) { Poke<uint64_t>(b, offsetof(format::FileHeader, required_features), 4), ResealHeader(b); }},
      {"wrong-magic", [](Bytes* b) { (*b)[4] = '\n'; }},
      {"damaged-header", [](Bytes* b) { (*b)[41] ^= 1; }},
      {"lost-site-record",
       [](Bytes* b) {
         for (const RecordSpan& r : RecordsOf(*b)) {
           if (r.kind == format::kKindSite) return void((*b)[r.offset + 30] ^= 1);
         }
       }},
      {"lost-process-record", [](Bytes* b) { (*b)[format::kHeaderBytes + 40] ^= 1; }},
      {"forged-segment-count",
       [event](Bytes* b) {
         const uint64_t at = event(*b, 4).offset;
         Poke<uint32_t>(b, at + 16 + offsetof(format::EventFixed, n_segments), 0x10000000), Reseal(b, at);
       }},
      {"empty", [](Bytes* b) { b->clear(); }},
  };
}

TEST(Golden, FilesOfVersion1ReadAsTheyAlwaysDid) {
  const bool write = std::getenv("ASSAY_WRITE_GOLDEN") != nullptr;
  const bool update = write || std::getenv("ASSAY_UPDATE_GOLDEN") != nullptr;
  const Bytes good = write ? GoodFile() : Bytes{};
  if (write) std::filesystem::create_directories(kFolder);
  for (const auto& [name, damage] : Faults()) {
    SCOPED_TRACE(name);
    const std::string stem = std::string(kFolder) + "/" + name;
    if (write) {
      Bytes bytes = good;
      damage(&bytes);
      WriteBytes(stem + ".assay", bytes);
    }
    ASSERT_TRUE(std::filesystem::exists(stem + ".assay"));
    const std::string report = ReportOf(ReadBytes(stem + ".assay"));
    if (update) WriteBytes(stem + ".expected", Bytes(report.begin(), report.end()));
    const Bytes expected = ReadBytes(stem + ".expected");
    ASSERT_FALSE(expected.empty());
    EXPECT_EQ(report, std::string(expected.begin(), expected.end()));
  }
}

// The writer of today writes what the golden writer wrote: a change of bytes is a change of the format.
TEST(Golden, WriterStillWritesTheSameRecords) {
  const Bytes golden = ReadBytes(std::string(kFolder) + "/good.assay");
  const Bytes now = GoodFile();
  ASSERT_EQ(golden.size(), now.size());
  EXPECT_TRUE(std::equal(golden.begin() + format::kHeaderBytes, golden.end(), now.begin() + format::kHeaderBytes));
}

}  // namespace
}  // namespace assay
