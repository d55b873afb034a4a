#include "trace/trace_file.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "base/crc32c.h"
#include "base/hex.h"
#include "trace/codec.h"
#include "trace/scan.h"

namespace assay {
namespace {

using format::FileHeader;
using format::LiveArea;

std::string Version(unsigned major, unsigned minor) { return std::to_string(major) + "." + std::to_string(minor); }

// REQUIRES: 64 bytes, which CheckHeader has made sure of.
FileHeader HeaderOf(std::span<const unsigned char> bytes) {
  FileHeader header;
  std::memcpy(&header, bytes.data(), sizeof header);
  return header;
}

// At least a whole header with the magic in front.
bool HasMagic(std::span<const unsigned char> bytes) {
  return bytes.size() >= sizeof(FileHeader) && std::memcmp(bytes.data(), format::kMagic, sizeof format::kMagic) == 0;
}

bool CrcIsGood(const FileHeader& header) { return Crc32c(&header, offsetof(FileHeader, crc)) == header.crc; }

// An error refuses the file; a wrong checksum is damage only, as all records carry their own.
Status CheckHeader(std::span<const unsigned char> bytes, const std::string& name, DamageList* damages) {
  if (bytes.size() < sizeof(FileHeader) ||
      std::all_of(bytes.begin(), bytes.begin() + 64, [](auto b) { return b == 0; })) {
    return Status::BadInput(name + ": offset 0: no header; the writer was killed while it opened the file");
  }
  if (!HasMagic(bytes)) return Status::BadInput(name + ": offset 0: not an assay trace file (wrong magic)");
  const FileHeader header = HeaderOf(bytes);
  if (!CrcIsGood(header)) {
    damages->Add(0, sizeof header, "file header: checksum mismatch; read as version 1", false);
    return {};
  }
  if (header.major == format::kMajor && header.required_features != 0) {
    return Status::BadInput(name + ": offset 24: trace uses features 0x" + Hex64(header.required_features) +
                            " that this assay does not know (install the version that wrote it)");
  }
  if (NeedsNewerReader(bytes)) {
    return Status::BadInput(name + ": offset 8: trace format " + Version(header.major, header.minor) +
                            " needs a newer assay; this one reads " + Version(format::kMajor, format::kMinor) +
                            " (install the version that wrote it)");
  }
  if (header.major != format::kMajor) {
    return Status::BadInput(name + ": offset 8: trace format " + Version(header.major, header.minor) + " is unknown");
  }
  return {};
}

// Takes the non-event records in file order.
class Collector {
 public:
  Collector(TraceFileIndex* index, DamageList* damages, bool newer_minor)
      : index_(index), damages_(damages), newer_minor_(newer_minor) {}

  // A record that does not decode is damage and nothing else: those behind it are still taken.
  void Take(const Record& record) {
    TraceProcess& process = index_->process;
    auto body = record.body();
    if (body.size() < sizeof(format::AuxHead)) return Bad(record, "record too short");
    body = body.subspan(sizeof(format::AuxHead));
    switch (record.kind) {
      case format::kKindProcess: {
        ProcessInfo info;
        if (!codec::DecodeProcess(body, &info)) return Bad(record, "bad process record");
        process.info = std::move(info);
        have_process_ = true;
        return;
      }
      case format::kKindSite: {
        SiteInfo site;
        if (!codec::DecodeSite(body, &site)) return Bad(record, "bad site record");
        sites_.push_back(std::move(site));
        return;
      }
      case format::kKindRequest: {
        RequestInfo request;
        if (!codec::DecodeRequest(body, &request)) return Bad(record, "bad request record");
        process.requests.push_back(std::move(request));
        return;
      }
      case format::kKindCoverage: {
        CoverageNote note;
        if (!codec::DecodeCoverage(body, &note)) return Bad(record, "bad coverage record");
        process.coverage.push_back(std::move(note));
        return;
      }
      case format::kKindMeta: {
        std::pair<std::string, std::string> pair;
        if (!codec::DecodeMeta(body, &pair.first, &pair.second)) return Bad(record, "bad metadata record");
        meta_.push_back(std::move(pair));
        return;
      }
      default:
        damages_->Add(record.offset, record.size_bytes, "unknown record kind " + std::to_string(record.kind),
                      newer_minor_);
    }
  }

  // Site ids that make sense: a forged one must not size a table.
  uint32_t max_sites() const { return static_cast<uint32_t>(2 * sites_.size() + 4096); }

  // Applies metadata and makes the site table dense: sites[id].id == id, lost names replaced.
  void Finish(uint32_t sites_needed) {
    TraceProcess& process = index_->process;
    if (!have_process_) damages_->Add(format::kHeaderBytes, 0, "no process record", false);
    auto& meta = process.info.meta;
    std::unordered_map<std::string, size_t> places;  // of keys in meta: a file of millions of pairs is read in time
    for (size_t i = 0; i < meta.size(); ++i) places.emplace(meta[i].first, i);
    for (auto& [key, value] : meta_) {
      const auto [place, is_new] = places.emplace(key, meta.size());
      if (is_new) {
        meta.emplace_back(std::move(key), std::move(value));
      } else {
        meta[place->second].second = std::move(value);
      }
    }
    const uint32_t max = max_sites();
    for (const SiteInfo& site : sites_) {
      if (site.id < max) sites_needed = std::max(sites_needed, site.id + 1);
    }
    process.sites.resize(std::min(sites_needed, max));
    std::vector<bool> named(process.sites.size());
    for (SiteInfo& site : sites_) {
      if (site.id >= max) {
        damages_->Add(0, 0, "site id " + std::to_string(site.id) + " is out of range", false);
      } else if (!named[site.id]) {
        named[site.id] = true;
        const uint32_t id = site.id;
        process.sites[id] = std::move(site);
      }
    }
    for (uint32_t id = 0; id < process.sites.size(); ++id) {
      if (named[id]) continue;
      process.sites[id].id = id;
      process.sites[id].name = "lost-site-" + std::to_string(id);
      damages_->Add(0, 0, "no record of site " + std::to_string(id), false);
    }
  }

 private:
  void Bad(const Record& record, const char* what) { damages_->Add(record.offset, record.size_bytes, what, false); }

  TraceFileIndex* index_;
  DamageList* damages_;
  bool newer_minor_;
  bool have_process_ = false;
  std::vector<SiteInfo> sites_;
  Metadata meta_;
};

// Copied once, as a running writer changes it. Zeros when the file is cut inside it.
LiveArea ReadLive(std::span<const unsigned char> bytes, TraceFileIndex* index) {
  LiveArea live{};
  if (bytes.size() >= format::kLiveOffset + sizeof live) {
    std::memcpy(&live, bytes.data() + format::kLiveOffset, sizeof live);
  }
  index->process.closed = live.closed == 1;
  index->process.drops = {live.drops[format::kDropByteCap], live.drops[format::kDropDiskFull],
                          live.drops[format::kDropPayloadBudget], live.drops[format::kDropInternal]};
  index->event_count_hint = live.next_sequence;
  return live;
}

// Offset of the first record: at least a page, at most the end of the file.
uint64_t RecordsBegin(std::span<const unsigned char> bytes) {
  const FileHeader header = HeaderOf(bytes);
  // A newer minor version may have a longer header; a damaged one must not send the scan astray.
  const bool usable = CrcIsGood(header) && header.header_bytes >= format::kHeaderBytes && header.header_bytes % 8 == 0;
  return std::min<uint64_t>(usable ? header.header_bytes : format::kHeaderBytes, bytes.size());
}

// Site id of a checked event record.
uint32_t SiteOf(const unsigned char* record) {
  uint32_t site;
  std::memcpy(&site, record + sizeof(format::RecordHeader) + offsetof(format::EventFixed, site), 4);
  return site;
}

}  // namespace

bool NeedsNewerReader(std::span<const unsigned char> bytes) {
  if (!HasMagic(bytes)) return false;
  const FileHeader header = HeaderOf(bytes);
  if (!CrcIsGood(header)) return false;
  return header.major > format::kMajor || (header.major == format::kMajor &&
                                           (header.min_reader_minor > format::kMinor || header.required_features != 0));
}

Status IndexTraceFile(std::span<const unsigned char> bytes, const std::string& name, const FirstNonZero& first_nonzero,
                      TraceFileIndex* index) {
  index->process.file = name;
  DamageList damages(name);
  ASSAY_RETURN_IF_ERROR(CheckHeader(bytes, name, &damages));
  const LiveArea live = ReadLive(bytes, index);
  const uint64_t begin = RecordsBegin(bytes);
  const uint64_t tail = live.tail & ~format::kTailClosed;
  // Behind the tail lies reserved space, which a writer may trim at any moment: touching it through the mapping could
  // then end this process, so it is looked at by read(2) (first_nonzero), and left out when it is empty.
  uint64_t limit = bytes.size();
  if (tail >= begin && tail < bytes.size() && first_nonzero(tail) >= bytes.size()) limit = tail;

  const FileHeader header = HeaderOf(bytes);
  Collector collector(index, &damages, CrcIsGood(header) && header.minor > format::kMinor);
  RecordScanner scanner(bytes, begin, limit, &damages);
  Record record;
  uint32_t sites_needed = 0;
  while (scanner.Next(&record)) {
    if (record.kind != format::kKindEvent) {
      collector.Take(record);
    } else if (!codec::CheckEvent(record.at, record.size_bytes)) {
      damages.Add(record.offset, record.size_bytes, "bad event record", false);
    } else {
      index->events.push_back(record.offset);
      const uint32_t site = SiteOf(record.at);
      sites_needed = std::max(sites_needed, site == UINT32_MAX ? site : site + 1);
    }
  }
  // A forged site id of some billions would make a table of gigabytes; such events go, and the rest is indexed anew.
  if (sites_needed > collector.max_sites()) {
    const uint32_t max = collector.max_sites();
    std::erase_if(index->events, [&](uint64_t offset) {
      if (SiteOf(bytes.data() + offset) < max) return false;
      damages.Add(offset, 0, "event of a site that cannot exist", false);
      return true;
    });
    sites_needed = 0;
    for (uint64_t offset : index->events) sites_needed = std::max(sites_needed, SiteOf(bytes.data() + offset) + 1);
  }
  collector.Finish(sites_needed);

  const uint64_t end = scanner.end_of_records();
  if (!index->process.closed) {
    if (!scanner.torn())
      damages.Add(end, bytes.size() - std::min<uint64_t>(end, bytes.size()),
                  "torn tail: the writer did not close; reserved space without records", true);
  } else if (tail > bytes.size()) {
    damages.Add(bytes.size(), tail - bytes.size(), "the file was closed and has been cut since", false);
  }
  index->damages = damages.Take();
  return {};
}

// Reads the header and the pages that hold non-event records: what lies between is never faulted in.
Status ReadTraceFileSummary(std::span<const unsigned char> bytes, const std::string& name, TraceFileIndex* index) {
  index->process.file = name;
  DamageList damages(name);
  ASSAY_RETURN_IF_ERROR(CheckHeader(bytes, name, &damages));
  const LiveArea live = ReadLive(bytes, index);
  std::vector<Record> chain;
  // Each step goes strictly back, so the walk ends.
  uint64_t before = bytes.size();
  for (uint64_t at = live.aux_head; at != 0;) {
    format::RecordHeader header;
    const bool inside = at % 8 == 0 && at >= format::kHeaderBytes && at < before && before - at >= 24;
    if (inside) std::memcpy(&header, bytes.data() + at, sizeof header);
    if (!inside || header.tag != format::kTagCommitted || header.size_bytes < 24 || header.size_bytes > before - at ||
        codec::RecordCrc(bytes.data() + at, header.size_bytes) != header.crc) {
      damages.Add(at, 0, "chain of non-event records is broken", false);
      break;
    }
    chain.push_back({bytes.data() + at, at, header.size_bytes, header.kind});
    before = at;
    std::memcpy(&at, bytes.data() + at + sizeof header, sizeof at);
  }
  const FileHeader header = HeaderOf(bytes);
  Collector collector(index, &damages, CrcIsGood(header) && header.minor > format::kMinor);
  for (size_t i = chain.size(); i-- > 0;) collector.Take(chain[i]);
  collector.Finish(0);
  index->damages = damages.Take();
  return {};
}

}  // namespace assay
