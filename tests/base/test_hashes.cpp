// Published vectors, and the machine's instructions against the portable code.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/crc32c.h"
#include "base/hash.h"
#include "base/hex.h"
#include "base/sha256.h"

namespace assay {
namespace {

std::vector<unsigned char> SomeBytes(size_t n, uint64_t seed) {
  SplitMix64 random(seed);
  std::vector<unsigned char> bytes(n);
  for (unsigned char& b : bytes) b = static_cast<unsigned char>(random.Next());
  return bytes;
}

// RFC 3720, appendix B.4.
TEST(Crc32c, MatchesTheVectorsOfRfc3720) {
  std::vector<unsigned char> bytes(32, 0);
  EXPECT_EQ(Crc32c(bytes.data(), 32), 0x8a9136aau);
  bytes.assign(32, 0xff);
  EXPECT_EQ(Crc32c(bytes.data(), 32), 0x62a8ab43u);
  for (size_t i = 0; i < 32; ++i) bytes[i] = static_cast<unsigned char>(i);
  EXPECT_EQ(Crc32c(bytes.data(), 32), 0x46dd794eu);
  for (size_t i = 0; i < 32; ++i) bytes[i] = static_cast<unsigned char>(31 - i);
  EXPECT_EQ(Crc32c(bytes.data(), 32), 0x113fdb5cu);
  EXPECT_EQ(Crc32c("123456789", 9), 0xe3069283u);
  EXPECT_EQ(Crc32c("", 0), 0u);
}

TEST(Crc32c, TablesAndInstructionAgreeAtEveryLengthAndOffset) {
  const auto bytes = SomeBytes(1000, 1);  // twice what is computed side by side
  for (size_t offset = 0; offset < 9; ++offset) {
    for (size_t n = 0; n + offset <= bytes.size(); ++n) {
      ASSERT_EQ(Crc32cExtend(7, bytes.data() + offset, n), Crc32cExtendPortable(7, bytes.data() + offset, n)) << n;
    }
  }
}

TEST(Crc32c, ExtendsOverAnyCut) {
  const auto bytes = SomeBytes(100, 2);
  const uint32_t whole = Crc32c(bytes.data(), 100);
  for (size_t cut = 0; cut <= 100; ++cut) {
    EXPECT_EQ(Crc32cExtend(Crc32c(bytes.data(), cut), bytes.data() + cut, 100 - cut), whole);
  }
}

// FIPS 180-4 examples and the million letters of the NIST test suite.
TEST(Sha256, MatchesThePublishedVectors) {
  const auto hex = [](const std::string& text) { return Sha256::HexOf(text.data(), text.size()); };
  EXPECT_EQ(hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, PiecesGiveTheHashOfTheWhole) {
  const auto bytes = SomeBytes(300, 3);
  for (size_t n = 0; n <= bytes.size(); ++n) {
    Sha256 pieces;
    for (size_t at = 0; at < n; at += 37) pieces.Update(bytes.data() + at, std::min<size_t>(37, n - at));
    ASSERT_EQ(pieces.Finish(), Sha256::Of(bytes.data(), n)) << n;
  }
}

TEST(Sha256, InstructionsAndPortableCodeAgree) {
  const auto bytes = SomeBytes(64 * 50, 4);
  for (size_t blocks = 0; blocks <= 50; ++blocks) {
    uint32_t a[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    uint32_t b[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    internal::Sha256Blocks(a, bytes.data(), blocks);
    internal::Sha256BlocksPortable(b, bytes.data(), blocks);
    for (int i = 0; i < 8; ++i) ASSERT_EQ(a[i], b[i]);
  }
}

TEST(Hex, DecodesWhatItEncodes) {
  const auto bytes = SomeBytes(33, 5);
  std::vector<unsigned char> back(33);
  ASSERT_TRUE(HexDecode(HexEncode(bytes.data(), 33), back.data(), 33));
  EXPECT_EQ(back, bytes);
  EXPECT_EQ(Hex64(0x0123456789abcdef), "0123456789abcdef");
}

TEST(Hex, RefusesWhatIsNotHex) {
  unsigned char out[2];
  EXPECT_TRUE(HexDecode("aB09", out, 2));
  EXPECT_FALSE(HexDecode("aB0", out, 2));
  EXPECT_FALSE(HexDecode("aB090", out, 2));
  EXPECT_FALSE(HexDecode("aB0g", out, 2));
  EXPECT_FALSE(HexDecode("../.", out, 2));
}

// First outputs of SplitMix64 from seed 0 as its author's reference code gives them.
TEST(Hash, SplitMixMatchesItsReference) {
  SplitMix64 random(0);
  EXPECT_EQ(random.Next(), 0xe220a8397b1dcdafu);
  EXPECT_EQ(random.Next(), 0x6e789e6aa1b965f4u);
  EXPECT_EQ(random.Next(), 0x06c45d188009454fu);
}

}  // namespace
}  // namespace assay
