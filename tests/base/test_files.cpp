#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <new>
#include <thread>
#include <vector>

#include "base/file_name.h"
#include "base/files.h"
#include "base/json_writer.h"
#include "base/mapped_file.h"
#include "base/parallel_for.h"

namespace assay {
namespace {

class Files : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "assay-files-XXXXXX").string();
    dir_ = ::mkdtemp(pattern.data());
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }
  std::string dir_;
};

TEST_F(Files, AtomicWriteReplacesAndLeavesNoTemporary) {
  const std::string path = dir_ + "/a.json";
  ASSERT_TRUE(AtomicWriteFile(path, "one").ok());
  ASSERT_TRUE(AtomicWriteFile(path, "two").ok());
  EXPECT_EQ(ReadFile(path).value(), "two");
  EXPECT_EQ(ListDir(dir_).value(), std::vector<std::string>{"a.json"});
}

TEST_F(Files, WriteIntoAbsentFolderNamesThePathAndTheReason) {
  const Status status = AtomicWriteFile(dir_ + "/absent/a", "x");
  EXPECT_EQ(status.code(), Code::kEnvironment);
  EXPECT_NE(status.message().find("/absent/a"), std::string::npos);
  EXPECT_NE(status.message().find("No such file or directory"), std::string::npos);
}

TEST_F(Files, MakeDirsMakesEveryLevelAndTakesExistingOnes) {
  EXPECT_TRUE(MakeDirs(dir_ + "/a/b//c/").ok());
  EXPECT_TRUE(MakeDirs(dir_ + "/a/b/c").ok());
  EXPECT_TRUE(IsDirectory(dir_ + "/a/b/c"));
  ASSERT_TRUE(AtomicWriteFile(dir_ + "/file", "").ok());
  EXPECT_EQ(MakeDirs(dir_ + "/file/sub").code(), Code::kEnvironment);
  ASSERT_EQ(::symlink("nowhere", (dir_ + "/link").c_str()), 0);
  EXPECT_NE(MakeDirs(dir_ + "/link").message().find("File exists"), std::string::npos);
}

TEST_F(Files, ReadRefusesMoreThanItsLimit) {
  ASSERT_TRUE(AtomicWriteFile(dir_ + "/a", "12345").ok());
  EXPECT_TRUE(ReadFile(dir_ + "/a", 5).ok());
  EXPECT_EQ(ReadFile(dir_ + "/a", 4).status().code(), Code::kBadInput);
}

TEST_F(Files, MappingAFifoOrFolderFailsInsteadOfWaiting) {
  ASSERT_EQ(::mkfifo((dir_ + "/fifo").c_str(), 0600), 0);
  EXPECT_EQ(MappedFile::Open(dir_ + "/fifo").status().code(), Code::kBadInput);
  EXPECT_EQ(MappedFile::Open(dir_).status().code(), Code::kBadInput);
  EXPECT_EQ(MappedFile::Open(dir_ + "/absent").status().code(), Code::kBadInput);
}

TEST_F(Files, EmptyFileMapsToNothing) {
  ASSERT_TRUE(AtomicWriteFile(dir_ + "/a", "").ok());
  EXPECT_TRUE(MappedFile::Open(dir_ + "/a").value().bytes().empty());
}

TEST_F(Files, FirstNonZeroSeesOverHolesAndBuffers) {
  const std::string path = dir_ + "/a";
  ASSERT_TRUE(AtomicWriteFile(path, "x").ok());
  ASSERT_EQ(::truncate(path.c_str(), 3 << 20), 0);
  const Result<MappedFile> zeros = MappedFile::Open(path);
  EXPECT_EQ(zeros->FirstNonZero(0), 0u);
  EXPECT_EQ(zeros->FirstNonZero(1), uint64_t{3} << 20);
  std::string content(700000, '\0');
  content[600001] = 1;
  ASSERT_TRUE(AtomicWriteFile(path, content).ok());
  EXPECT_EQ(MappedFile::Open(path)->FirstNonZero(5), 600001u);
  EXPECT_EQ(MappedFile::Open(path)->FirstNonZero(600002), 700000u);
}

TEST(ParallelFor, CallsEveryIndexOnce) {
  for (int threads : {0, 1, 2, 7}) {
    for (int64_t n : {0, 1, 5, 100}) {
      std::vector<std::atomic<int>> calls(static_cast<size_t>(n));
      ParallelFor(n, threads, [&](int64_t i) { ++calls[static_cast<size_t>(i)]; });
      for (const auto& c : calls) EXPECT_EQ(c.load(), 1);
    }
  }
}

// In a thread of its own an exception would end the process.
TEST(ParallelFor, ExceptionOfABodyReachesTheCaller) {
  for (int threads : {1, 2, 7}) {
    for (int64_t thrower : {0, 1, 99}) {
      std::atomic<int> calls = 0;
      const auto body = [&](int64_t i) {
        ++calls;
        if (i == thrower) throw std::bad_alloc();
      };
      EXPECT_THROW(ParallelFor(100, threads, body), std::bad_alloc) << threads << " " << thrower;
      EXPECT_LE(calls, 100);
    }
  }
}

// Both sides wait for each other, so that the one that throws is surely not the caller's thread alone.
TEST(ParallelFor, ExceptionOfAHelperReachesTheCaller) {
  std::atomic<int> inside = 0;
  const auto caller = std::this_thread::get_id();
  const auto body = [&](int64_t) {
    ++inside;
    while (inside < 2) std::this_thread::yield();
    if (std::this_thread::get_id() != caller) throw std::bad_alloc();
  };
  EXPECT_THROW(ParallelFor(2, 2, body), std::bad_alloc);
}

TEST_F(Files, LoopOfLinksAndTooLongANameAreBadInput) {
  std::filesystem::create_symlink("loop", dir_ + "/loop");
  for (const std::string& path : {dir_ + "/loop", dir_ + "/loop/x", dir_ + "/" + std::string(300, 'x')}) {
    EXPECT_EQ(MappedFile::Open(path).status().code(), Code::kBadInput) << path;
  }
}

TEST(SafeFileName, KeepsPlainCharactersAndNeverHides) {
  EXPECT_EQ(SafeFileName("node-3.cluster"), "node-3.cluster");
  EXPECT_EQ(SafeFileName("a/../b \xff"), "a_.._b__");
  EXPECT_EQ(SafeFileName(".hidden"), "host.hidden");
  EXPECT_EQ(SafeFileName(""), "host");
  EXPECT_EQ(SafeFileName(std::string(100, 'a')).size(), 64u);
}

TEST(JsonWriter, NestsAndSeparates) {
  JsonWriter json;
  json.BeginObject();
  json.Key("a"), json.Int(-1);
  json.Key("b"), json.BeginArray(), json.EndArray();
  json.Key("c"), json.BeginArray(), json.Bool(true), json.Double(0.1), json.EndArray();
  json.EndObject();
  EXPECT_EQ(json.text(), "{\n  \"a\": -1,\n  \"b\": [],\n  \"c\": [\n    true,\n    0.10000000000000001\n  ]\n}\n");
}

TEST(JsonWriter, EscapesAndMendsText) {
  EXPECT_EQ(JsonQuote("a\"b\\c\n\t\x01"), "\"a\\\"b\\\\c\\n\\t\\u0001\"");
  EXPECT_EQ(JsonQuote("h\xc3\xa9 \xf0\x9f\x98\x80"), "\"h\xc3\xa9 \xf0\x9f\x98\x80\"");
  // Lone continuation, overlong slash, surrogate, above U+10FFFF, cut sequence: one U+FFFD a byte.
  const std::string r = "\xef\xbf\xbd";
  EXPECT_EQ(JsonQuote("\x80"), "\"" + r + "\"");
  EXPECT_EQ(JsonQuote("\xc0\xaf"), "\"" + r + r + "\"");
  EXPECT_EQ(JsonQuote("\xed\xa0\x80"), "\"" + r + r + r + "\"");
  EXPECT_EQ(JsonQuote("\xf4\x90\x80\x80"), "\"" + r + r + r + r + "\"");
  EXPECT_EQ(JsonQuote("a\xe2\x82"), "\"a" + r + r + "\"");
}

TEST(JsonWriter, NonFiniteNumbersAreStrings) {
  JsonWriter json;
  json.BeginArray();
  json.Double(__builtin_nan("")), json.Double(__builtin_inf()), json.Double(-__builtin_inf());
  json.EndArray();
  EXPECT_EQ(json.text(), "[\n  \"NaN\",\n  \"Infinity\",\n  \"-Infinity\"\n]\n");
}

}  // namespace
}  // namespace assay
