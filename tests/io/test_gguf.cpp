#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "io/gguf.h"

namespace assay {
namespace {

// Bytes of a file as they are written, piece by piece.
class Bytes {
 public:
  template <class T>
  Bytes& Add(T value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof(T));
    return *this;
  }
  Bytes& Text(const std::string& s) {
    Add(static_cast<uint64_t>(s.size()));
    text_ += s;
    return *this;
  }
  Bytes& Pad(size_t alignment) {
    text_.resize((text_.size() + alignment - 1) / alignment * alignment, '\0');
    return *this;
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

Bytes Head(uint64_t tensors, uint64_t pairs, uint32_t version = 3) {
  Bytes b;
  b.Add(uint32_t{0x46554747}).Add(version).Add(tensors).Add(pairs);
  return b;
}

Bytes& Tensor(Bytes& b, const std::string& name, uint64_t cols, uint64_t rows, uint32_t type, uint64_t offset) {
  return b.Text(name).Add(uint32_t{2}).Add(cols).Add(rows).Add(type).Add(offset);
}

Result<GgufFile> Parse(const std::string& text) {
  return ParseGguf(reinterpret_cast<const std::byte*>(text.data()), text.size(), "m.gguf");
}

void ExpectError(const std::string& text, const std::string& part) {
  const auto parsed = Parse(text);
  ASSERT_FALSE(parsed.ok()) << "accepted; expected: " << part;
  EXPECT_EQ(parsed.status().code(), Code::kBadInput);
  EXPECT_EQ(parsed.status().message().rfind("m.gguf: ", 0), 0u) << parsed.status().message();
  EXPECT_NE(parsed.status().message().find(part), std::string::npos) << parsed.status().message();
  EXPECT_NE(parsed.status().message().find("offset "), std::string::npos) << parsed.status().message();
}

TEST(Gguf, PairsAndTensorsOfASmallFile) {
  Bytes b = Head(1, 3);
  b.Text("general.architecture").Add(uint32_t{8}).Text("llama");
  b.Text("llama.block_count").Add(uint32_t{4}).Add(uint32_t{7});
  b.Text("words").Add(uint32_t{9}).Add(uint32_t{8}).Add(uint64_t{2}).Text("a").Text("bc");
  Tensor(b, "blk.0.ffn_up.weight", 32, 2, 2, 0);
  b.Pad(32);
  const size_t start = b.text().size();
  const std::string text = b.text() + std::string(36, 'x');
  const auto file = Parse(text);
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(file->find("general.architecture")->text(), "llama");
  EXPECT_EQ(file->find("llama.block_count")->integer(), 7);
  EXPECT_EQ(file->find("words")->texts(), (std::vector<std::string_view>{"a", "bc"}));
  ASSERT_EQ(file->tensors.size(), 1u);
  EXPECT_EQ(file->tensors[0].shape, (std::vector<int64_t>{2, 32}));
  EXPECT_EQ(file->tensors[0].size_bytes, 36u);
  EXPECT_EQ(file->tensors[0].file_offset, start);
}

TEST(Gguf, EveryTruncationIsAnErrorOrTheSameFile) {
  Bytes b = Head(1, 1);
  b.Text("k").Add(uint32_t{9}).Add(uint32_t{4}).Add(uint64_t{2}).Add(uint32_t{1}).Add(uint32_t{2});
  Tensor(b, "t", 32, 1, 2, 0);
  b.Pad(32);
  const std::string text = b.text() + std::string(18, 'x');
  ASSERT_TRUE(Parse(text).ok());
  for (size_t n = 0; n < text.size(); ++n) EXPECT_FALSE(Parse(text.substr(0, n)).ok()) << n;
}

TEST(Gguf, ForgedSizesAreRefused) {
  ExpectError("GGUX", "magic is missing");
  ExpectError(Head(0, 0, 1).text(), "version 1");
  ExpectError(Head(uint64_t{1} << 60, 0).text(), "do not fit the file");
  ExpectError(Head(0, uint64_t{1} << 60).text() + std::string(64, '\0'), "do not fit the file");
  Bytes array = Head(0, 1);
  array.Text("k").Add(uint32_t{9}).Add(uint32_t{10}).Add(uint64_t{1} << 61);
  ExpectError(array.text(), "ends beyond the file");
  Bytes nested = Head(0, 1);
  nested.Text("k").Add(uint32_t{9}).Add(uint32_t{9}).Add(uint64_t{1});
  ExpectError(nested.text() + std::string(64, '\0'), "nested type");
  Bytes overflow = Head(1, 0);
  Tensor(overflow, "t", uint64_t{1} << 40, uint64_t{1} << 40, 0, 0);
  ExpectError(overflow.text(), "is no size");
  Bytes beyond = Head(1, 0);
  Tensor(beyond, "t", 32, 2, 2, 32);
  beyond.Pad(32);
  ExpectError(beyond.text() + std::string(36, 'x'), "end beyond the file");
  Bytes uneven = Head(1, 0);
  Tensor(uneven, "t", 33, 1, 2, 0);
  ExpectError(uneven.text() + std::string(64, '\0'), "do not fill blocks");
  Bytes unknown = Head(1, 0);
  Tensor(unknown, "t", 32, 1, 99, 0);
  ExpectError(unknown.text() + std::string(64, '\0'), "unknown type 99");
}

TEST(Gguf, NamesAndKeysThatStandTwiceAreRefused) {
  Bytes pairs = Head(0, 2);
  for (int i = 0; i < 2; ++i) pairs.Text("k").Add(uint32_t{0}).Add(uint8_t{1});
  ExpectError(pairs.text() + std::string(32, '\0'), "key \"k\" stands twice");
  Bytes tensors = Head(2, 0);
  for (int i = 0; i < 2; ++i) Tensor(tensors, "t", 32, 1, 2, 0);
  tensors.Pad(32);
  ExpectError(tensors.text() + std::string(32, '\0'), "tensor \"t\" stands twice");
}

}  // namespace
}  // namespace assay
