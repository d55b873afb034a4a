#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "io/json.h"
#include "model/text_split.h"
#include "model/tokenizer.h"

namespace assay {
namespace {

const char* const kPath = ASSAY_SOURCE_DIR "/models/kjv-mla-10m/tokenizer.json";

std::unique_ptr<Tokenizer> Shipped() {
  auto loaded = Tokenizer::Load(kPath);
  EXPECT_TRUE(loaded.ok()) << loaded.status().message();
  return std::move(loaded).value();
}

Json ShippedJson() {
  std::ifstream file(kPath);
  std::stringstream text;
  text << file.rdbuf();
  return *ParseJson(text.str(), "tokenizer.json");
}

std::string ErrorOf(const Json& json) {
  const auto parsed = Tokenizer::Parse(WriteJson(json), "tokenizer.json");
  if (parsed.ok()) return "accepted";
  EXPECT_EQ(parsed.status().code(), Code::kBadInput);
  return parsed.status().message();
}

void ExpectRefused(const Json& json, const std::string& part) {
  EXPECT_NE(ErrorOf(json).find(part), std::string::npos) << ErrorOf(json);
}

std::vector<std::string> Pieces(std::string_view text) {
  std::vector<std::string> pieces;
  for (const std::string_view p : SplitByteLevel(text)) pieces.emplace_back(p);
  return pieces;
}

using Strings = std::vector<std::string>;

TEST(TextSplit, WordsTakeOneSpaceBeforeThem) {
  EXPECT_EQ(Pieces("In the  beginning\n\nGod 12"),
            (Strings{"In", " the", " ", " beginning", "\n", "\n", "God", " 12"}));
  EXPECT_EQ(Pieces("a   "), (Strings{"a", "   "}));
  EXPECT_EQ(Pieces(" \n x"), (Strings{" \n", " x"}));
  EXPECT_EQ(Pieces("a\u3000\u3000b"), (Strings{"a", "\u3000", "\u3000", "b"}));
  EXPECT_TRUE(Pieces("").empty());
}

TEST(TextSplit, ContractionsAreCaseSensitiveAndFirst) {
  EXPECT_EQ(Pieces("he'll I'm 're 'Re don't"),
            (Strings{"he", "'ll", " I", "'m", " '", "re", " '", "Re", " don", "'t"}));
  EXPECT_EQ(Pieces("'sx'tx"), (Strings{"'s", "x", "'t", "x"}));
}

TEST(TextSplit, ClassesAreThoseOfUnicode) {
  EXPECT_EQ(ClassOf(U'é'), CharClass::kLetter);
  EXPECT_EQ(ClassOf(0x1C89), CharClass::kLetter) << "Unicode 16";
  EXPECT_EQ(ClassOf(0x2160), CharClass::kNumber) << "Roman numeral one";
  EXPECT_EQ(ClassOf(0x0301), CharClass::kOther) << "combining mark";
  EXPECT_EQ(ClassOf(0x85), CharClass::kSpace);
  EXPECT_EQ(ClassOf(0x1C), CharClass::kOther) << "a separator for Python, no White_Space";
  EXPECT_EQ(ClassOf(0x10FFFF), CharClass::kOther);
  EXPECT_EQ(Pieces("日本語123½x"), (Strings{"日本語", "123½", "x"}));
}

TEST(Utf8, EveryScalarValueIsReadBack) {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string text;
    AppendUtf8(c, &text);
    const DecodedChar read = DecodeUtf8(text);
    ASSERT_TRUE(read.valid && read.code == c && read.size_bytes == static_cast<int>(text.size()))
        << static_cast<uint32_t>(c);
  }
}

TEST(Utf8, IllFormedPartsAreMaximal) {
  const auto length = [](std::string_view text) {
    const DecodedChar c = DecodeUtf8(text);
    return c.valid ? -c.size_bytes : c.size_bytes;
  };
  EXPECT_EQ(length("\x80"), 1);
  EXPECT_EQ(length("\xC0\x80"), 1) << "overlong";
  EXPECT_EQ(length("\xE0\x80\x80"), 1) << "overlong";
  EXPECT_EQ(length("\xED\xA0\x80"), 1) << "surrogate";
  EXPECT_EQ(length("\xF4\x90\x80\x80"), 1) << "above U+10FFFF";
  EXPECT_EQ(length("\xE2\x82"), 2) << "cut short";
  EXPECT_EQ(length("\xF0\x9F\x92"), 3);
  EXPECT_EQ(length("\xF0\x9F\x92x"), 3);
  EXPECT_EQ(length("\xF0\x9F\x92\xA9"), -4);
}

// Strings and their ids by the `tokenizers` package (tests/parity/make_tokenizer_cases.py), or those of the file that
// ASSAY_TOKENIZER_CASES names.
TEST(TokenizerCases, IdsAndRoundTripsAreThoseOfTheReference) {
  const char* other = std::getenv("ASSAY_TOKENIZER_CASES");
  std::ifstream file(other != nullptr ? other : ASSAY_SOURCE_DIR "/tests/parity/tokenizer_cases.json");
  std::stringstream text;
  text << file.rdbuf();
  const auto cases = ParseJson(text.str(), "cases");
  ASSERT_TRUE(cases.ok()) << cases.status().message();
  ASSERT_GT(cases->size(), 100u);
  const auto tokenizer = Shipped();
  EXPECT_EQ(tokenizer->vocab_size(), 2048);
  for (const Json& entry : *cases) {
    const auto& string = entry["text"].get_ref<const std::string&>();
    const auto ids = tokenizer->Encode(string);
    ASSERT_TRUE(ids.ok()) << ids.status().message();
    EXPECT_EQ(*ids, entry["ids"].get<std::vector<int64_t>>()) << entry["text"];
    EXPECT_EQ(tokenizer->Decode(*ids, false), string);
  }
  std::printf("%zu strings\n", cases->size());
}

TEST(Tokenizer, TextSurvivesTheRoundTrip) {
  const auto tokenizer = Shipped();
  for (const std::string text :
       {"In the beginning God created the heaven and the earth.", "", " ", "\n\n\t x  ",
        "h\u00e9llo w\u00f6rld \u65e5\u672c \U0001F4A9", "don't 'll 12 34", "<|begin|>And<|end|>"}) {
    EXPECT_EQ(tokenizer->Decode(*tokenizer->Encode(text), false), text);
  }
  std::string zero("a\0b", 3);
  EXPECT_EQ(tokenizer->Decode(*tokenizer->Encode(zero), false), zero);
}

TEST(Tokenizer, AddedTokensAreMatchedFirstAndSkippedOnRequest) {
  const auto tokenizer = Shipped();
  const auto ids = tokenizer->Encode("<|begin|>And<|end|>");
  ASSERT_TRUE(ids.ok());
  EXPECT_EQ(ids->front(), 0);
  EXPECT_EQ(ids->back(), 1);
  EXPECT_EQ(tokenizer->Decode(*ids, true), "And");
}

TEST(Tokenizer, LongestAddedTokenWins) {
  Json json = ShippedJson();
  json["added_tokens"].push_back({{"id", 2048}, {"content", "<|begin|>x"}, {"special", false}});
  const auto tokenizer = Tokenizer::Parse(WriteJson(json), "tokenizer.json");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  EXPECT_EQ(*(*tokenizer)->Encode("<|begin|>x<|begin|>"), (std::vector<int64_t>{2048, 0}));
  EXPECT_EQ((*tokenizer)->vocab_size(), 2049);
  EXPECT_EQ((*tokenizer)->Decode({2048, 0}, true), "<|begin|>x");
}

TEST(Tokenizer, TemplateTokensSurroundTheText) {
  Json json = ShippedJson();
  json["post_processor"]["single"] = *ParseJson(
      R"([{"SpecialToken":{"id":"B","type_id":0}},{"Sequence":{"id":"A","type_id":0}},{"SpecialToken":{"id":"E","type_id":0}}])",
      "t");
  json["post_processor"]["special_tokens"] =
      *ParseJson(R"({"B":{"id":"B","ids":[0],"tokens":["B"]},"E":{"id":"E","ids":[1,2],"tokens":["E","P"]}})", "t");
  const auto tokenizer = Tokenizer::Parse(WriteJson(json), "tokenizer.json");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  EXPECT_EQ(*(*tokenizer)->Encode(""), (std::vector<int64_t>{0, 1, 2}));
}

TEST(Tokenizer, TextThatIsNotUtf8IsRefusedWithTheOffset) {
  const auto ids = Shipped()->Encode("abc\xff");
  ASSERT_FALSE(ids.ok());
  EXPECT_EQ(ids.status().code(), Code::kUsage);
  EXPECT_EQ(ids.status().message(), "text is not UTF-8 at byte 3");
}

TEST(Tokenizer, CutAndUnknownTokensDecodeToReplacementCharacters) {
  const auto tokenizer = Shipped();
  const auto ids = tokenizer->Encode("\U0001F4A9");
  ASSERT_EQ(ids->size(), 4u) << "four byte tokens";
  EXPECT_EQ(tokenizer->Decode({(*ids)[0], (*ids)[1]}, false), "\uFFFD");
  EXPECT_EQ(tokenizer->Decode({(*ids)[1], (*ids)[1]}, false), "\uFFFD\uFFFD");
  EXPECT_EQ(tokenizer->Decode({999999, -1}, false), "\uFFFD\uFFFD");
}

TEST(Tokenizer, LongRunOfOneLetterIsQuick) {
  const auto tokenizer = Shipped();
  const std::string text(1 << 20, 'a');
  const auto start = std::chrono::steady_clock::now();
  const auto ids = tokenizer->Encode(text);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  ASSERT_TRUE(ids.ok());
  EXPECT_EQ(tokenizer->Decode(*ids, false), text);
  EXPECT_LT(seconds, 20) << "a quadratic merge would take hours";
}

TEST(Tokenizer, FeaturesThatAreNotReadAreNamed) {
  const Json good = ShippedJson();
  ASSERT_EQ(ErrorOf(good), "accepted");
  const auto with = [&](const std::string& pointer, const char* value) {
    Json json = good;
    json[Json::json_pointer(pointer)] = *ParseJson(value, "v");
    return json;
  };
  ExpectRefused(with("/normalizer", R"({"type":"NFC"})"), "\"normalizer\" is not read natively");
  ExpectRefused(with("/truncation", R"({"max_length":8})"), "\"truncation\"");
  ExpectRefused(with("/padding", "{}"), "\"padding\"");
  ExpectRefused(with("/model/type", "\"WordPiece\""), "model type WordPiece");
  ExpectRefused(with("/model/dropout", "0.1"), "\"dropout\"");
  ExpectRefused(with("/model/unk_token", "\"x\""), "\"unk_token\"");
  ExpectRefused(with("/model/byte_fallback", "true"), "\"byte_fallback\"");
  ExpectRefused(with("/model/ignore_merges", "true"), "\"ignore_merges\"");
  ExpectRefused(with("/model/end_of_word_suffix", "\"</w>\""), "\"end_of_word_suffix\"");
  ExpectRefused(with("/pre_tokenizer", "null"), "missing pre_tokenizer");
  ExpectRefused(with("/pre_tokenizer/type", "\"Split\""), "pre_tokenizer type Split");
  ExpectRefused(with("/pre_tokenizer/add_prefix_space", "true"), "\"add_prefix_space\"");
  ExpectRefused(with("/pre_tokenizer/use_regex", "false"), "\"use_regex\"");
  ExpectRefused(with("/decoder", "null"), "missing decoder");
  ExpectRefused(with("/decoder/type", "\"Metaspace\""), "decoder type Metaspace");
  ExpectRefused(with("/post_processor/type", "\"Sequence\""), "post_processor type Sequence");
  ExpectRefused(with("/added_tokens/0/lstrip", "true"), "\"lstrip\" of added token \"<|begin|>\"");
}

TEST(Tokenizer, DamagedEntriesAreNamed) {
  const Json good = ShippedJson();
  const auto with = [&](const std::string& pointer, const char* value) {
    Json json = good;
    json[Json::json_pointer(pointer)] = *ParseJson(value, "v");
    return json;
  };
  ExpectRefused(with("/model/vocab/the", "-1"), "vocab entry \"the\"");
  ExpectRefused(with("/model/vocab/the", "4"), "id 4 is used twice");
  ExpectRefused(with("/model/vocab/the", "99999999999"), "out of range");
  ExpectRefused(with("/model/vocab", "{}"), "lacks the symbol of byte 0");
  ExpectRefused(with("/model/vocab", "[]"), "\"model.vocab\"");
  ExpectRefused(with("/model/merges/7", "[\"t\"]"), "merge 7 is no pair");
  ExpectRefused(with("/model/merges/7", "\"t\""), "merge 7 is no pair");
  ExpectRefused(with("/model/merges/7", "[\"t\",\"q#\"]"), "not in the vocabulary");
  ExpectRefused(with("/model/merges", "3"), "\"model.merges\"");
  ExpectRefused(with("/model", "3"), "\"model\" is missing");
  ExpectRefused(with("/added_tokens/0/id", "5"), "contradicts the vocabulary");
  ExpectRefused(with("/added_tokens/0/content", "\"\""), "no usable content");
  ExpectRefused(with("/added_tokens", "3"), "\"added_tokens\"");
  ExpectRefused(with("/post_processor/single", "[]"), "no place for the text");
  ExpectRefused(with("/post_processor/single/0", R"({"SpecialToken":{"id":"Z"}})"), "has no ids");
  EXPECT_NE(Tokenizer::Parse("{", "t.json").status().message().find("t.json: invalid JSON"), std::string::npos);
  EXPECT_NE(Tokenizer::Parse("[]", "t.json").status().message().find("no JSON object"), std::string::npos);
}

TEST(Tokenizer, OlderMergeSpellingIsRead) {
  Json json = ShippedJson();
  for (Json& merge : json["model"]["merges"]) merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
  const auto tokenizer = Tokenizer::Parse(WriteJson(json), "tokenizer.json");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  EXPECT_EQ(*(*tokenizer)->Encode("And the"), *Shipped()->Encode("And the"));
}

}  // namespace
}  // namespace assay
