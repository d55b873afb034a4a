// One test a kind of damage: what is lost, what is said, and that everything else is still read.
#include <algorithm>

#include "trace_bytes.h"

namespace assay {
namespace {

using namespace testing;  // NOLINT: this file is about one thing

constexpr int kEvents = 8;

std::vector<int64_t> AllStepsBut(std::initializer_list<int64_t> lost) {
  std::vector<int64_t> steps;
  for (int64_t i = 0; i < kEvents; ++i) {
    if (std::find(lost.begin(), lost.end(), i) == lost.end()) steps.push_back(i);
  }
  return steps;
}

// The span of event number `step`.
RecordSpan EventSpan(const Bytes& bytes, int step) {
  for (const RecordSpan& record : RecordsOf(bytes)) {
    if (record.kind == format::kKindEvent && step-- == 0) return record;
  }
  ADD_FAILURE();
  return {};
}

void MarkOpen(Bytes* bytes) { Poke<uint64_t>(bytes, format::kLiveOffset + offsetof(format::LiveArea, closed), 0); }

TEST(Damage, TruncatedTailIsIgnoredAtEveryCut) {
  Bytes bytes = SomeFile(kEvents);
  MarkOpen(&bytes);
  const RecordSpan last = EventSpan(bytes, kEvents - 1);
  for (uint64_t cut = last.offset; cut < last.offset + last.size_bytes; ++cut) {
    const Bytes torn(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(cut));
    auto trace = Parse(torn);
    ASSERT_EQ(StepsOf(*trace), AllStepsBut({kEvents - 1})) << cut;
    ASSERT_FALSE(trace->damages().empty());
    for (const Damage& d : trace->damages()) ASSERT_TRUE(d.benign) << cut << " " << d.what;
    ASSERT_EQ(trace->damages()[0].what.substr(0, 9), "torn tail");
  }
}

TEST(Damage, FileCutInsideItsHeaderHasNoEvents) {
  Bytes whole = SomeFile(1);
  MarkOpen(&whole);
  for (size_t size = 64; size <= format::kHeaderBytes; size += 7) {
    const Bytes bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size));
    EXPECT_EQ(Parse(bytes)->event_count(), 0u) << size;
  }
  const Bytes stump(whole.begin(), whole.begin() + 63);
  EXPECT_EQ(Trace::FromBytes(stump, "memory").status().code(), Code::kBadInput);
}

TEST(Damage, ClosedFileThatWasCutIsNotBenign) {
  Bytes bytes = SomeFile(kEvents);
  bytes.resize(bytes.size() - 8);
  auto trace = Parse(bytes);
  EXPECT_EQ(StepsOf(*trace), AllStepsBut({kEvents - 1}));
  EXPECT_TRUE(std::any_of(trace->damages().begin(), trace->damages().end(), [](const Damage& d) { return !d.benign; }));
}

TEST(Damage, EveryFlippedByteCostsItsRecordAlone) {
  const Bytes bytes = SomeFile(kEvents);
  const RecordSpan victim = EventSpan(bytes, 3);
  for (uint64_t at = victim.offset; at < victim.offset + victim.size_bytes; ++at) {
    Bytes damaged = bytes;
    damaged[at] ^= 0x40;
    auto trace = Parse(damaged);
    ASSERT_EQ(StepsOf(*trace), AllStepsBut({3})) << at - victim.offset;
    ASSERT_EQ(trace->damages().size(), 1u);
    ASSERT_EQ(trace->damages()[0].offset, victim.offset);
    ASSERT_EQ(trace->damages()[0].size_bytes, victim.size_bytes);
    ASSERT_FALSE(trace->damages()[0].benign);
    ASSERT_EQ(trace->damages()[0].file, "memory");
  }
}

TEST(Damage, OverwrittenStretchCostsTheRecordsItTouches) {
  Bytes bytes = SomeFile(kEvents);
  const RecordSpan from = EventSpan(bytes, 2), to = EventSpan(bytes, 4);
  SplitMix64 random(1);
  for (uint64_t at = from.offset + 50; at < to.offset + 50; ++at) bytes[at] = static_cast<unsigned char>(random.Next());
  EXPECT_EQ(StepsOf(*Parse(bytes)), AllStepsBut({2, 3, 4}));
}

TEST(Damage, RecordReservedButNeverCommittedIsABenignHole) {
  Bytes bytes = SomeFile(kEvents);
  const RecordSpan hole = EventSpan(bytes, 5);
  Poke(&bytes, hole.offset, format::kTagReserved);
  auto trace = Parse(bytes);
  EXPECT_EQ(StepsOf(*trace), AllStepsBut({5}));
  ASSERT_EQ(trace->damages().size(), 1u);
  EXPECT_TRUE(trace->damages()[0].benign);
  EXPECT_EQ(trace->damages()[0].offset, hole.offset);
  EXPECT_EQ(trace->damages()[0].size_bytes, hole.size_bytes);
  EXPECT_EQ(trace->damages()[0].what, "hole: record reserved, never committed");
}

TEST(Damage, SpaceThatWasNeverWrittenIsABenignHole) {
  Bytes bytes = SomeFile(kEvents);
  const RecordSpan hole = EventSpan(bytes, 5);
  std::memset(bytes.data() + hole.offset, 0, hole.size_bytes);
  auto trace = Parse(bytes);
  EXPECT_EQ(StepsOf(*trace), AllStepsBut({5}));
  ASSERT_EQ(trace->damages().size(), 1u);
  EXPECT_TRUE(trace->damages()[0].benign);
  EXPECT_EQ(trace->damages()[0].size_bytes, hole.size_bytes);
}

TEST(Damage, ReservedRecordOfForgedLengthDoesNotHideTheRest) {
  Bytes bytes = SomeFile(kEvents);
  const RecordSpan hole = EventSpan(bytes, 5);
  Poke(&bytes, hole.offset, format::kTagReserved);
  Poke(&bytes, hole.offset + 4, hole.size_bytes + 24);
  auto trace = Parse(bytes);
  EXPECT_EQ(StepsOf(*trace), AllStepsBut({5}));
  ASSERT_EQ(trace->damages().size(), 1u);
  EXPECT_FALSE(trace->damages()[0].benign);
}

// After power loss the page with the counters may be older than the pages with the records.
TEST(Damage, StaleTailMarkHidesNothing) {
  Bytes bytes = SomeFile(kEvents);
  MarkOpen(&bytes);
  for (uint64_t tail : {uint64_t{0}, uint64_t{4096}, EventSpan(bytes, 4).offset, uint64_t{1} << 40, ~uint64_t{0}}) {
    Poke(&bytes, format::kLiveOffset + offsetof(format::LiveArea, tail), tail);
    EXPECT_EQ(StepsOf(*Parse(bytes)), AllStepsBut({})) << tail;
  }
}

TEST(Damage, UnknownRecordOfANewerMinorVersionIsSkipped) {
  Bytes bytes = SomeFile(kEvents);
  const RecordSpan unknown = EventSpan(bytes, 1);
  Poke<uint16_t>(&bytes, unknown.offset + 12, 37);
  Reseal(&bytes, unknown.offset);
  auto trace = Parse(bytes);
  EXPECT_EQ(StepsOf(*trace), AllStepsBut({1}));
  ASSERT_EQ(trace->damages().size(), 1u);
  EXPECT_EQ(trace->damages()[0].what, "unknown record kind 37");
  EXPECT_FALSE(trace->damages()[0].benign) << "version 1.0 has no kind 37";

  Poke<uint16_t>(&bytes, offsetof(format::FileHeader, minor), 9);
  ResealHeader(&bytes);
  trace = Parse(bytes);
  EXPECT_EQ(StepsOf(*trace), AllStepsBut({1}));
  ASSERT_EQ(trace->damages().size(), 1u);
  EXPECT_TRUE(trace->damages()[0].benign);
}

// A later minor version may lengthen the fixed parts and add groups and segment sections behind those known.
TEST(Damage, LongerRecordOfANewerMinorVersionIsUnderstood) {
  Event wrote = SomeEvent(1, 130, 32, 2);
  wrote.meta = {{"a", "b"}};
  wrote.shard = {1, 2, 32, 64};
  const uint32_t size_bytes = codec::EventSize(wrote).value();
  Bytes record(size_bytes);
  codec::EncodeEvent(wrote, record.data());

  Bytes longer(record.begin(), record.begin() + 80);
  longer.insert(longer.end(), 16, 0xee);  // fields of EventFixed to come
  const auto old_segments_at = Peek<uint32_t>(record, 16 + offsetof(format::EventFixed, segments_at));
  longer.insert(longer.end(), record.begin() + 80, record.begin() + old_segments_at);
  longer.insert(longer.end(), 24, 0xdd);  // a group to come
  const auto segments_at = static_cast<uint32_t>(longer.size());
  longer.insert(longer.end(), 8, 0);  // table of two entries
  uint64_t old_segment = old_segments_at + 8;
  for (uint32_t i = 0; i < 3; ++i) {
    if (i > 0) Poke(&longer, segments_at + 4 * (i - 1), static_cast<uint32_t>(longer.size()));
    const auto old_bytes = Peek<uint32_t>(record, old_segment + offsetof(format::SegmentFixed, size_bytes));
    const uint64_t start = longer.size();
    const auto at = record.begin() + static_cast<std::ptrdiff_t>(old_segment);
    longer.insert(longer.end(), at, at + 128);
    longer.insert(longer.end(), 8, 0xcc);  // fields of SegmentFixed to come
    longer.insert(longer.end(), at + 128, at + old_bytes);
    longer.insert(longer.end(), 32, 0xbb);  // a section to come
    Poke(&longer, start + offsetof(format::SegmentFixed, size_bytes), static_cast<uint32_t>(longer.size() - start));
    Poke<uint16_t>(&longer, start + offsetof(format::SegmentFixed, fixed_bytes), 136);
    const auto flags = Peek<uint32_t>(longer, start + offsetof(format::SegmentFixed, flags));
    Poke(&longer, start + offsetof(format::SegmentFixed, flags), flags | 1u << 20);
    old_segment += old_bytes;
  }
  Poke<uint16_t>(&longer, 16 + offsetof(format::EventFixed, fixed_bytes), 80);
  Poke(&longer, 16 + offsetof(format::EventFixed, segments_at), segments_at);
  const auto groups = Peek<uint16_t>(longer, 16 + offsetof(format::EventFixed, groups));
  Poke(&longer, 16 + offsetof(format::EventFixed, groups), static_cast<uint16_t>(groups | 1u << 12));
  Poke(&longer, 0, format::kTagCommitted);
  Poke(&longer, 4, static_cast<uint32_t>(longer.size()));
  Reseal(&longer, 0);

  Bytes file = SomeFile(1);
  Poke<uint16_t>(&file, offsetof(format::FileHeader, minor), 9);
  ResealHeader(&file);
  file.insert(file.end(), longer.begin(), longer.end());
  auto trace = Parse(file);
  ASSERT_EQ(trace->event_count(), 2u);
  EXPECT_TRUE(trace->damages().empty());
  ExpectEvent(wrote, trace->event(1).Decode());
  EXPECT_EQ(trace->event(1).shard().full_cols, 64);
}

TEST(Damage, NewerMajorVersionIsRefusedByNumber) {
  Bytes bytes = SomeFile(1);
  Poke<uint16_t>(&bytes, offsetof(format::FileHeader, major), 2);
  ResealHeader(&bytes);
  const auto trace = Trace::FromBytes(bytes, "memory");
  ASSERT_EQ(trace.status().code(), Code::kBadInput);
  EXPECT_NE(trace.status().message().find("trace format 2.0 needs a newer assay"), std::string::npos)
      << trace.status().message();
}

TEST(Damage, OneNewerFileRefusesTheWholeFolder) {
  const TempDir dir;
  Bytes bytes = SomeFile(1);
  WriteBytes(dir.path() + "/a.assay", bytes);
  Poke<uint16_t>(&bytes, offsetof(format::FileHeader, min_reader_minor), 1);
  ResealHeader(&bytes);
  WriteBytes(dir.path() + "/b.assay", bytes);
  EXPECT_EQ(Trace::Open(dir.path()).status().code(), Code::kBadInput);
  EXPECT_TRUE(Trace::Open(dir.path() + "/a.assay").ok());
}

TEST(Damage, UnknownRequiredFeatureIsRefusedAndOptionalOneIsNot) {
  Bytes bytes = SomeFile(1);
  Poke<uint64_t>(&bytes, offsetof(format::FileHeader, optional_features), 0xff);
  ResealHeader(&bytes);
  EXPECT_TRUE(Trace::FromBytes(bytes, "memory").ok());
  Poke<uint64_t>(&bytes, offsetof(format::FileHeader, required_features), 1);
  ResealHeader(&bytes);
  EXPECT_EQ(Trace::FromBytes(bytes, "memory").status().code(), Code::kBadInput);
}

TEST(Damage, FileThatIsNoTraceIsSkippedInAFolderAndSaid) {
  const TempDir dir;
  WriteBytes(dir.path() + "/a.assay", SomeFile(kEvents));
  WriteBytes(dir.path() + "/b.assay", Bytes(5000, 'x'));
  WriteBytes(dir.path() + "/c.assay", {});
  auto trace = std::move(Trace::Open(dir.path())).value();
  EXPECT_EQ(trace->event_count(), uint64_t{kEvents});
  ASSERT_EQ(trace->damages().size(), 2u);
  EXPECT_FALSE(trace->damages()[0].benign);
  EXPECT_NE(trace->damages()[0].what.find("wrong magic"), std::string::npos);
  EXPECT_TRUE(trace->damages()[1].benign) << "killed while it opened the file";
}

TEST(Damage, FileThatCannotBeReadIsNotTakenForOneKilledAtItsStart) {
  const TempDir dir;
  WriteBytes(dir.path() + "/a.assay", SomeFile(kEvents));
  std::filesystem::create_directory(dir.path() + "/b.assay");
  auto trace = std::move(Trace::Open(dir.path())).value();
  EXPECT_EQ(trace->event_count(), uint64_t{kEvents});
  ASSERT_EQ(trace->damages().size(), 1u);
  EXPECT_FALSE(trace->damages()[0].benign) << "what a process recorded is missing";
}

TEST(Damage, DamagedHeaderStillGivesTheEvents) {
  Bytes bytes = SomeFile(kEvents);
  bytes[20] ^= 1;
  auto trace = Parse(bytes);
  EXPECT_EQ(StepsOf(*trace), AllStepsBut({}));
  ASSERT_EQ(trace->damages().size(), 1u);
  EXPECT_FALSE(trace->damages()[0].benign);
}

TEST(Damage, LostSiteRecordLeavesItsEventsUnderAPlaceholder) {
  Bytes bytes = SomeFile(kEvents);
  for (const RecordSpan& record : RecordsOf(bytes)) {
    if (record.kind == format::kKindSite) bytes[record.offset + 30] ^= 1;
  }
  auto trace = Parse(bytes);
  EXPECT_EQ(StepsOf(*trace), AllStepsBut({}));
  EXPECT_EQ(trace->site_names()[trace->event(0).global_site()], "lost-site-0");
  EXPECT_EQ(trace->processes()[0].sites[0].id, 0u);
}

TEST(Damage, ForgedSiteNumbersDoNotSizeTables) {
  Bytes bytes = SomeFile(kEvents);
  const RecordSpan event = EventSpan(bytes, 2);
  for (uint32_t site : {5000u, 0x7fffffffu, 0xffffffffu}) {
    Poke(&bytes, event.offset + 16 + offsetof(format::EventFixed, site), site);
    Reseal(&bytes, event.offset);
    auto trace = Parse(bytes);
    EXPECT_EQ(StepsOf(*trace), AllStepsBut({2}));
    EXPECT_LT(trace->processes()[0].sites.size(), 10u);
  }
}

TEST(Damage, SegmentOfRowsThatNoTensorHasIsRefused) {
  const Bytes whole = SomeFile(3);
  const RecordSpan event = EventSpan(whole, 1);
  const uint64_t fixed_at = event.offset + sizeof(format::RecordHeader);
  const uint64_t segment = event.offset + Peek<uint32_t>(whole, fixed_at + offsetof(format::EventFixed, segments_at));
  for (const auto& [field, value] : {std::pair<size_t, int64_t>{offsetof(format::SegmentFixed, first_row), -1},
                                     {offsetof(format::SegmentFixed, first_row), INT64_MAX},
                                     {offsetof(format::SegmentFixed, first_position), INT64_MAX}}) {
    Bytes bytes = whole;
    Poke(&bytes, segment + field, value);
    Reseal(&bytes, event.offset);
    auto trace = Parse(bytes);
    EXPECT_EQ(trace->event_count(), 2u) << field << " " << value;
    ASSERT_EQ(trace->damages().size(), 1u);
    EXPECT_EQ(trace->damages()[0].what, "bad event record");
  }
}

// Readers add widths to a shard's first column.
TEST(Damage, ShardBeyondAllColumnsIsRefused) {
  Event wrote = SomeEvent(1, 130, 32);
  wrote.shard = {1, 2, 32, 64};
  Bytes record(codec::EventSize(wrote).value());
  codec::EncodeEvent(wrote, record.data());
  const auto size_bytes = static_cast<uint32_t>(record.size());
  ASSERT_TRUE(codec::CheckEvent(record.data(), size_bytes));
  const uint64_t shard = sizeof(format::RecordHeader) + sizeof(format::EventFixed);
  for (const size_t field : {offsetof(format::ShardGroup, col_offset), offsetof(format::ShardGroup, full_cols)}) {
    for (const int64_t value : {INT64_MAX, INT64_MIN}) {
      Bytes forged = record;
      Poke(&forged, shard + field, value);
      EXPECT_FALSE(codec::CheckEvent(forged.data(), size_bytes)) << field << " " << value;
    }
  }
  wrote.shard.col_offset = INT64_MAX;
  EXPECT_FALSE(codec::EventSize(wrote).ok());
}

TEST(Damage, SegmentsThatShareBytesAreRefused) {
  Event wrote = SomeEvent(1, 130, 32);
  Bytes record(codec::EventSize(wrote).value());
  codec::EncodeEvent(wrote, record.data());
  const auto size_bytes = static_cast<uint32_t>(record.size());
  ASSERT_TRUE(codec::CheckEvent(record.data(), size_bytes));
  const auto table = Peek<uint32_t>(record, 16 + offsetof(format::EventFixed, segments_at));
  Poke(&record, table, Peek<uint32_t>(record, table + 4));
  EXPECT_FALSE(codec::CheckEvent(record.data(), size_bytes));
}

// Checksums do not stop malice: any byte may be anything with a fitting checksum.
TEST(Damage, ForgedBytesWithGoodChecksumsNeverReachOutside) {
  const Bytes bytes = SomeFile(3);
  for (const RecordSpan& record : RecordsOf(bytes)) {
    for (uint64_t at = record.offset + 12; at < record.offset + record.size_bytes; ++at) {
      for (const unsigned char value : Bytes{0x00, 0x01, 0x7f, 0x80, 0xff}) {
        Bytes forged = bytes;
        forged[at] = value;
        Reseal(&forged, record.offset);
        const Result<std::unique_ptr<Trace>> trace = Trace::FromBytes(forged, "memory");
        ASSERT_TRUE(trace.ok());
        (void)Touch(*trace.value());
        ASSERT_LE(trace.value()->event_count(), 3u);
        ASSERT_GE(trace.value()->event_count(), 2u);
      }
    }
  }
}

TEST(Damage, FileFullOfForgedHeadersIsReadInLinearTime) {
  Bytes bytes = SomeFile(0);
  const size_t start = bytes.size();
  bytes.resize(start + (4 << 20));
  // A plausible header with a wrong checksum and a long record every 16 bytes.
  for (size_t at = start; at + 16 <= bytes.size(); at += 16) {
    Poke(&bytes, at, format::kTagCommitted);
    Poke(&bytes, at + 4, static_cast<uint32_t>((bytes.size() - at) / 8 * 8));
  }
  MarkOpen(&bytes);
  auto trace = Parse(bytes);
  EXPECT_EQ(trace->event_count(), 0u);
  EXPECT_FALSE(trace->damages().empty());
}

TEST(Damage, FileFullOfMetadataKeysIsReadInLinearTime) {
  Bytes bytes = SomeFile(1);
  constexpr int kPairs = 60000;
  for (int i = 0; i < 2 * kPairs; ++i) {  // each key twice: the later value holds
    const std::string body = codec::EncodeMeta("key " + std::to_string(i % kPairs), std::to_string(i));
    const size_t at = bytes.size();
    const uint64_t size_bytes = format::PadTo8(sizeof(format::RecordHeader) + sizeof(format::AuxHead) + body.size());
    bytes.resize(at + size_bytes);
    Poke(&bytes, at, format::kTagCommitted);
    Poke(&bytes, at + 4, static_cast<uint32_t>(size_bytes));
    Poke<uint16_t>(&bytes, at + 12, format::kKindMeta);
    std::memcpy(bytes.data() + at + sizeof(format::RecordHeader) + sizeof(format::AuxHead), body.data(), body.size());
    Reseal(&bytes, at);
  }
  auto trace = Parse(bytes);
  const Metadata& meta = trace->processes()[0].info.meta;
  const size_t first = SomeProcess().meta.size();
  ASSERT_EQ(meta.size(), first + kPairs);
  EXPECT_EQ(meta[first].first, "key 0");
  EXPECT_EQ(meta[first].second, std::to_string(kPairs));
}

TEST(Damage, ListOfDamagesIsBounded) {
  Bytes bytes = SomeFile(0);
  for (int i = 0; i < 5000; ++i) {
    const size_t at = bytes.size();
    bytes.resize(at + 16);
    Poke(&bytes, at, format::kTagReserved);
    Poke<uint32_t>(&bytes, at + 4, 16);
  }
  auto trace = Parse(bytes);
  ASSERT_EQ(trace->damages().size(), 1001u);
  EXPECT_EQ(trace->damages().back().what, "4000 further damages");
  EXPECT_EQ(trace->damages().back().size_bytes, 4000u * 16);
}

}  // namespace
}  // namespace assay
