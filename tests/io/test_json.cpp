#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/json_writer.h"
#include "io/json.h"

namespace assay {
namespace {

std::string ErrorOf(std::string_view text, uint64_t base_offset = 0) {
  const Result<Json> parsed = ParseJson(text, "file.json", base_offset);
  if (parsed.ok()) return "accepted: " + WriteJson(*parsed, -1);
  EXPECT_EQ(parsed.status().code(), Code::kBadInput);
  return parsed.status().message();
}

TEST(Json, DocumentIsReadInOrderAndWrittenBack) {
  const std::string text = R"({"b":[1,-2,3.5,true,null,"x\u00e9"],"a":{"c":{},"d":[]},"n":18446744073709551615})";
  const Result<Json> parsed = ParseJson(text, "file.json");
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  EXPECT_EQ(WriteJson(*parsed, -1), R"({"b":[1,-2,3.5,true,null,"xé"],"a":{"c":{},"d":[]},"n":18446744073709551615})");
  EXPECT_EQ((*parsed)["b"][1], -2);
}

TEST(Json, ScalarsAreDocuments) {
  EXPECT_EQ(WriteJson(*ParseJson("7", "f"), -1), "7");
  EXPECT_EQ(WriteJson(*ParseJson(" \"x\" ", "f"), -1), "\"x\"");
}

TEST(Json, DuplicateKeyIsRefusedWithItsOffset) {
  EXPECT_EQ(ErrorOf(R"({"a":1,"a":2})"), R"(file.json: invalid JSON at byte 10: duplicate key "a")");
  EXPECT_NE(ErrorOf(R"({"o":{"k":1,"j":2,"k":3}})").find("duplicate key \"k\""), std::string::npos);
}

TEST(Json, EqualKeysInDifferentObjectsAreAccepted) { EXPECT_TRUE(ParseJson(R"({"a":{"a":1},"b":{"a":2}})", "f").ok()); }

TEST(Json, SyntaxErrorNamesTheByteWithTheBaseOffset) {
  EXPECT_NE(ErrorOf(R"({"a":1,})", 100).find("at byte 107:"), std::string::npos) << ErrorOf(R"({"a":1,})", 100);
  EXPECT_NE(ErrorOf("").find("at byte 0:"), std::string::npos) << ErrorOf("");
}

TEST(Json, TruncatedAndTrailingTextAreRefused) {
  for (const char* text :
       {"{", "[1,", "{\"a\"", "\"abc", "tru", "{} x", "[1] [2]", "nan", "NaN", "Infinity", "01", "+1"}) {
    EXPECT_EQ(ErrorOf(text).rfind("file.json: invalid JSON at byte ", 0), 0u) << text << " -> " << ErrorOf(text);
  }
}

TEST(Json, InvalidUtf8IsRefused) { EXPECT_NE(ErrorOf("\"\xff\"").find("UTF-8"), std::string::npos); }

TEST(Json, NumberBeyondDoubleIsRefused) { EXPECT_NE(ErrorOf("[1e999]").find("number"), std::string::npos); }

TEST(Json, DepthLimitHoldsForArraysAndObjects) {
  const std::string deepest(kMaxJsonDepth, '['), closes(kMaxJsonDepth, ']');
  EXPECT_TRUE(ParseJson(deepest + closes, "f").ok());
  EXPECT_NE(ErrorOf("[" + deepest + closes + "]").find("nested deeper than 64 levels"), std::string::npos);
  std::string objects;
  for (int i = 0; i <= kMaxJsonDepth; ++i) objects += "{\"a\":";
  EXPECT_NE(ErrorOf(objects).find("nested deeper"), std::string::npos);
  EXPECT_NE(ErrorOf(std::string(1'000'000, '[')).find("at byte 65:"), std::string::npos);
}

TEST(Json, ManyKeysAreReadInLinearTime) {
  std::string text = "{";
  for (int i = 0; i < 200'000; ++i) text += (i ? ",\"k" : "\"k") + std::to_string(i) + "\":0";
  const Result<Json> parsed = ParseJson(text + "}", "f");
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->size(), 200'000u);
}

TEST(Json, NonFiniteNumbersAreWrittenAsStrings) {
  Json json = {{"a", std::nan("")}, {"b", {std::numeric_limits<double>::infinity(), -INFINITY, 1.5}}};
  EXPECT_EQ(WriteJson(json, -1), R"({"a":"NaN","b":["Infinity","-Infinity",1.5]})");
  EXPECT_EQ(JsonNumber(2.5), Json(2.5));
  EXPECT_EQ(JsonNumber(-INFINITY), Json("-Infinity"));
}

TEST(Json, DoublesSurviveTheRoundTrip) {
  for (const double x : {0.1, 1.0 / 3, 5e-324, 1.7976931348623157e308, -2.2250738585072014e-308}) {
    EXPECT_EQ(ParseJson(WriteJson(Json(x)), "f")->get<double>(), x);
  }
}

TEST(Json, BytesThatAreNotUtf8AreReplacedOnOutput) { EXPECT_EQ(WriteJson(Json("a\xff")), "\"a\xEF\xBF\xBD\""); }

// A name with ESC [ of eight bits and a right-to-left override; the euro sign stays.
TEST(Json, WhatTerminalsObeyIsEscapedAndReadsBackTheSame) {
  const std::string name = "a\u009b31m\u202eb\u2066\u20ac";
  EXPECT_EQ(WriteJson(Json(name)), "\"a\\u009b31m\\u202eb\\u2066\u20ac\"");
  EXPECT_EQ(ParseJson(WriteJson(Json(name)), "x")->get<std::string>(), name);
  EXPECT_EQ(JsonQuote(name), WriteJson(Json(name)));
}

TEST(Json, FindKeyReturnsNullForMissingKeyAndOtherTypes) {
  const Json json = {{"a", 1}};
  EXPECT_EQ(*FindKey(json, "a"), 1);
  EXPECT_EQ(FindKey(json, "b"), nullptr);
  EXPECT_EQ(FindKey(Json(3), "a"), nullptr);
}

}  // namespace
}  // namespace assay
