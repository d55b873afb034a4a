#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/mapped_file.h"
#include "io/json.h"
#include "io/safetensors.h"

namespace assay {
namespace {

namespace fs = std::filesystem;

class Safetensors : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::temp_directory_path() / ("assay_safetensors_" + std::to_string(::getpid()) + "_" +
                                        testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }

  std::string Path(const std::string& name) const { return (dir_ / name).string(); }

  void Write(const std::string& name, const std::string& bytes) const {
    std::ofstream(Path(name), std::ios::binary) << bytes;
  }

  fs::path dir_;
};

// Bytes of a file with this header and data.
std::string File(const std::string& header, const std::string& data) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[static_cast<size_t>(i)] = static_cast<char>(header.size() >> (8 * i));
  return bytes + header + data;
}

std::string ErrorOf(const std::string& bytes) {
  const Result<SafetensorsFile> parsed =
      ParseSafetensors(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size(), "x.safetensors");
  if (parsed.ok()) return "accepted";
  EXPECT_EQ(parsed.status().code(), Code::kBadInput);
  EXPECT_EQ(parsed.status().message().rfind("x.safetensors: ", 0), 0u) << parsed.status().message();
  return parsed.status().message();
}

void ExpectError(const std::string& bytes, const std::string& part) {
  EXPECT_NE(ErrorOf(bytes).find(part), std::string::npos) << ErrorOf(bytes) << "\nlacks: " << part;
}

std::string Entry(const std::string& name, const std::string& dtype, const std::string& shape, const std::string& at) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + at + "}";
}

TEST_F(Safetensors, TensorsAreMappedInNameOrderWithFileOffsets) {
  const std::string header = "{" + Entry("b", "F32", "[2]", "[0,8]") + "," + Entry("a", "BF16", "[1,3]", "[8,14]") +
                             ",\"__metadata__\":{\"format\":\"pt\"}}";
  Write("m.safetensors", File(header, std::string("\x00\x00\x80\x3f\x00\x00\x00\x40", 8) + "abcdef"));
  const auto checkpoint = Checkpoint::Open(Path("m.safetensors"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  const auto& tensors = (*checkpoint)->tensors();
  ASSERT_EQ(tensors.size(), 2u);
  EXPECT_EQ(tensors[0].name, "a");
  EXPECT_EQ(tensors[0].shape, (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(tensors[0].dtype, DType::kBF16);
  EXPECT_EQ(std::memcmp(tensors[0].data, "abcdef", 6), 0);
  EXPECT_EQ(tensors[1].file_offset, 8 + header.size());
  EXPECT_EQ(tensors[0].file_offset, 8 + header.size() + 8);
  float one_two[2];
  std::memcpy(one_two, (*checkpoint)->find("b")->data, 8);
  EXPECT_EQ(one_two[0], 1.0f);
  EXPECT_EQ(one_two[1], 2.0f);
  EXPECT_EQ((*checkpoint)->find("c"), nullptr);
}

TEST_F(Safetensors, EmptyTensorsAndScalarsAreRead) {
  EXPECT_EQ(ErrorOf(File("{" + Entry("e", "F32", "[0,4]", "[0,0]") + "," + Entry("s", "F64", "[]", "[0,8]") + "}",
                         std::string(8, 'x'))),
            "accepted");
  EXPECT_EQ(ErrorOf(File("{}", "")), "accepted");
  EXPECT_EQ(ErrorOf(File("{}    ", "")), "accepted");
  EXPECT_EQ(ErrorOf(File("{" + Entry("q", "F4", "[3,2]", "[0,3]") + "}", "abc")), "accepted");
}

TEST_F(Safetensors, TruncationAtEveryByteIsRefused) {
  const std::string whole = File("{" + Entry("a", "F32", "[2,2]", "[0,16]") + "}", std::string(16, 'x'));
  ASSERT_EQ(ErrorOf(whole), "accepted");
  for (size_t n = 0; n < whole.size(); ++n) EXPECT_NE(ErrorOf(whole.substr(0, n)), "accepted") << n;
}

TEST_F(Safetensors, ForgedHeaderLengthIsRefused) {
  ExpectError("", "too short");
  ExpectError(std::string(8, '\xff') + "{}", "header length 18446744073709551615 at offset 0 is above the limit");
  ExpectError(std::string("\x10\0\0\0\0\0\0\0{}", 10), "header of 16 bytes at offset 8 ends beyond the file");
}

TEST_F(Safetensors, ForgedOffsetsAreRefused) {
  const auto one = [](const std::string& shape, const std::string& at) {
    return File("{" + Entry("a", "F32", shape, at) + "}", std::string(16, 'x'));
  };
  ExpectError(one("[4]", "[0,17]"), "end beyond the file");
  ExpectError(one("[4]", "[16,0]"), "run backwards");
  ExpectError(one("[4]", "[0,9223372036854775808]"), "are no sizes");
  ExpectError(one("[4]", "[-16,0]"), "are no sizes");
  ExpectError(one("[4]", "[0]"), "no pair");
  ExpectError(one("[4]", "[0.0,16.0]"), "are no sizes");
  ExpectError(one("[3]", "[0,16]"), "hold 16 bytes, shape [3] of F32 needs 12");
}

TEST_F(Safetensors, OverflowingShapeIsRefused) {
  const auto shape = [](const std::string& s) { return File("{" + Entry("a", "F32", s, "[0,0]") + "}", ""); };
  ExpectError(shape("[4294967296,4294967296]"), "overflows");
  ExpectError(shape("[9223372036854775807]"), "overflows");
  ExpectError(shape("[18446744073709551615]"), "is no size");
  ExpectError(shape("[-1]"), "is no size");
  ExpectError(shape("[1.5]"), "is no size");
  ExpectError(File("{" + Entry("q", "F4", "[3]", "[0,1]") + "}", "a"), "overflows");
  EXPECT_EQ(ErrorOf(shape("[0,9223372036854775807,9223372036854775807]")), "accepted");
  std::string ones = "[1";
  for (int i = 1; i < 33; ++i) ones += ",1";
  ExpectError(File("{" + Entry("a", "U8", ones + "]", "[0,1]") + "}", "x"), "rank 33 is above the limit");
}

TEST_F(Safetensors, OverlapHoleAndRestAreRefused) {
  const auto two = [](const std::string& a, const std::string& b) {
    return File("{" + Entry("a", "U8", "[4]", a) + "," + Entry("b", "U8", "[4]", b) + "}", "12345678");
  };
  EXPECT_EQ(ErrorOf(two("[4,8]", "[0,4]")), "accepted");
  ExpectError(two("[0,4]", "[2,6]"), "overlaps");
  ExpectError(two("[0,4]", "[0,4]"), "overlaps");
  ExpectError(File("{" + Entry("a", "U8", "[4]", "[4,8]") + "}", "12345678"), "unused bytes before it");
  ExpectError(File("{" + Entry("a", "U8", "[4]", "[0,4]") + "}", "12345678"), "4 bytes at offset");
}

TEST_F(Safetensors, MalformedEntriesAreRefusedByName) {
  ExpectError(File("[]", ""), "no JSON object");
  ExpectError(File("{\"a\":3}", ""), "header at offset 8, entry \"a\": not an object");
  ExpectError(File("{" + Entry("a", "F33", "[0]", "[0,0]") + "}", ""), "unknown dtype \"F33\"");
  ExpectError(File(R"({"a":{"shape":[0],"data_offsets":[0,0]}})", ""), "dtype is missing");
  ExpectError(File(R"({"a":{"dtype":"F32","data_offsets":[0,0]}})", ""), "shape is missing");
  ExpectError(File(R"({"a":{"dtype":"F32","shape":[0]}})", ""), "data_offsets is no pair");
  ExpectError(File(R"({"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0],"x":1}})", ""), "unknown key \"x\"");
  ExpectError(File(R"({"__metadata__":{"k":1}})", ""), "is no string");
  ExpectError(File("{" + Entry("a", "F32", "[0]", "[0,0]") + "," + Entry("a", "F32", "[0]", "[0,0]") + "}", ""),
              "duplicate key \"a\"");
  ExpectError(File("{\"a\":", ""), "invalid JSON at byte 13");
}

// A folder with two shards: shard 1 holds "a", shard 2 holds "b".
class Sharded : public Safetensors {
 protected:
  void SetUp() override {
    Safetensors::SetUp();
    Write("1.safetensors", File("{" + Entry("a", "U8", "[2]", "[0,2]") + "}", "aa"));
    Write("2.safetensors", File("{" + Entry("b", "U8", "[2]", "[0,2]") + "}", "bb"));
  }
  std::string OpenWith(const std::string& index) {
    Write("model.safetensors.index.json", index);
    const auto opened = Checkpoint::Open(dir_.string());
    if (opened.ok()) return "accepted " + std::to_string((*opened)->tensors().size());
    EXPECT_EQ(opened.status().code(), Code::kBadInput);
    return opened.status().message();
  }
  void ExpectIndexError(const std::string& index, const std::string& part) {
    const std::string error = OpenWith(index);
    EXPECT_NE(error.find(part), std::string::npos) << error;
  }
};

TEST_F(Sharded, IndexJoinsTheShards) {
  EXPECT_EQ(OpenWith(R"({"metadata":{"total_size":4},"weight_map":{"a":"1.safetensors","b":"2.safetensors"}})"),
            "accepted 2");
  const auto by_index_file = Checkpoint::Open(Path("model.safetensors.index.json"));
  ASSERT_TRUE(by_index_file.ok());
  EXPECT_EQ((*by_index_file)->find("b")->file, Path("2.safetensors"));
}

TEST_F(Sharded, PathsOutOfTheFolderAreRefused) {
  for (const char* name : {"../1.safetensors", "/etc/passwd", "sub/1.safetensors", "..", ".", ""}) {
    ExpectIndexError(std::string(R"({"weight_map":{"a":")") + name + "\"}}", "no file name inside the folder");
  }
  ExpectIndexError(R"({"weight_map":{"a":"1.safetensors\u0000x"}})", "no file name inside the folder");
}

TEST_F(Sharded, MissingShardIsNamed) {
  ExpectIndexError(R"({"weight_map":{"a":"1.safetensors","b":"3.safetensors"}})", "3.safetensors: cannot be read");
}

TEST_F(Sharded, TensorMissingFromItsShardIsNamed) {
  ExpectIndexError(R"({"weight_map":{"a":"1.safetensors","b":"2.safetensors","c":"2.safetensors"}})",
                   "tensor \"c\" is listed in");
}

TEST_F(Sharded, TensorNotListedIsNamed) {
  Write("2.safetensors",
        File("{" + Entry("b", "U8", "[1]", "[0,1]") + "," + Entry("x", "U8", "[1]", "[1,2]") + "}", "bx"));
  ExpectIndexError(R"({"weight_map":{"a":"1.safetensors","b":"2.safetensors"}})", "tensor \"x\" at offset");
}

TEST_F(Sharded, TensorInTheWrongShardIsNamed) {
  ExpectIndexError(R"({"weight_map":{"b":"1.safetensors","a":"2.safetensors"}})", "as part of");
}

TEST_F(Sharded, MalformedIndexIsRefused) {
  ExpectIndexError("{}", "\"weight_map\" is missing");
  ExpectIndexError(R"({"weight_map":[]})", "\"weight_map\" is missing or no object");
  ExpectIndexError(R"({"weight_map":{"a":1}})", "is no string");
  ExpectIndexError(R"({"weight_map":{"a":"1.safetensors","a":"2.safetensors"}})", "duplicate key");
}

TEST_F(Safetensors, MissingPathFolderWithoutModelAndFifoAreRefused) {
  EXPECT_EQ(Checkpoint::Open(Path("none")).status().code(), Code::kBadInput);
  EXPECT_NE(Checkpoint::Open(dir_.string()).status().message().find("holds neither"), std::string::npos);
  ASSERT_EQ(::mkfifo(Path("fifo").c_str(), 0600), 0);
  EXPECT_NE(Checkpoint::Open(Path("fifo")).status().message().find("not a regular file"), std::string::npos);
}

TEST_F(Safetensors, WrittenFileIsReadBack) {
  const float x[6] = {1, 2, 3, 4, 5, 6};
  const uint8_t y[3] = {7, 8, 9};
  CheckpointTensor a{"z", DType::kF32, {2, 3}, reinterpret_cast<const std::byte*>(x), 24, "", 0};
  CheckpointTensor b{"y", DType::kU8, {3}, reinterpret_cast<const std::byte*>(y), 3, "", 0};
  CheckpointTensor e{"empty", DType::kBF16, {0, 2}, nullptr, 0, "", 0};
  ASSERT_TRUE(WriteSafetensors(Path("w.safetensors"), {a, b, e}, {{"format", "pt"}}).ok());
  const auto mapped = MappedFile::Open(Path("w.safetensors"));
  ASSERT_TRUE(mapped.ok());
  const auto parsed = ParseSafetensors(mapped->bytes().data(), mapped->bytes().size(), "w");
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  EXPECT_EQ(parsed->metadata, (std::vector<std::pair<std::string, std::string>>{{"format", "pt"}}));
  ASSERT_EQ(parsed->tensors.size(), 3u);
  EXPECT_EQ(parsed->tensors[2].name, "z");
  EXPECT_EQ(std::memcmp(parsed->tensors[2].data, x, 24), 0);
  EXPECT_EQ(parsed->tensors[2].file_offset % 8, 0u);
  EXPECT_EQ(std::memcmp(parsed->tensors[1].data, y, 3), 0);
  EXPECT_EQ(std::distance(fs::directory_iterator(dir_), fs::directory_iterator{}), 1);  // no temporary file left
}

TEST_F(Safetensors, WriterRefusesWhatItCouldNotReadBack) {
  const uint8_t y[4] = {};
  const CheckpointTensor t{"t", DType::kU8, {4}, reinterpret_cast<const std::byte*>(y), 4, "", 0};
  CheckpointTensor short_one = t, reserved = t, untyped = t;
  short_one.size_bytes = 3;
  reserved.name = "__metadata__";
  untyped.dtype = DType::kInvalid;
  for (const auto& tensors : {std::vector{t, t}, {short_one}, {reserved}, {untyped}}) {
    EXPECT_EQ(WriteSafetensors(Path("w"), tensors, {}).code(), Code::kUsage);
  }
  EXPECT_EQ(WriteSafetensors(Path("no/folder/w"), {t}, {}).code(), Code::kEnvironment);
  EXPECT_FALSE(fs::exists(Path("w")));
}

TEST_F(Safetensors, FullDiskIsReportedAndLeavesNoFile) {
  if (::access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full here";
  // The temporary file "TARGET.tmpPID" is a link to the device that is always full.
  const std::string target = Path("w.safetensors");
  fs::create_symlink("/dev/full", target + ".tmp" + std::to_string(::getpid()));
  const uint8_t y[4] = {};
  const CheckpointTensor t{"t", DType::kU8, {4}, reinterpret_cast<const std::byte*>(y), 4, "", 0};
  const Status status = WriteSafetensors(target, {t}, {});
  EXPECT_EQ(status.code(), Code::kEnvironment);
  EXPECT_NE(status.message().find("No space left"), std::string::npos) << status.message();
  EXPECT_FALSE(fs::exists(target));
}

TEST(ShippedModel, BothShardsOpen) {
  const auto opened = Checkpoint::Open(ASSAY_SOURCE_DIR "/models/kjv-mla-10m");
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  const CheckpointTensor* embed = (*opened)->find("model.embed_tokens.weight");
  ASSERT_NE(embed, nullptr);
  EXPECT_EQ(embed->shape, (std::vector<int64_t>{2048, 256}));
  EXPECT_EQ(embed->dtype, DType::kBF16);
}

}  // namespace
}  // namespace assay
