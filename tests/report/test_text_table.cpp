#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "report/text_table.h"

namespace assay {
namespace {

TEST(TextTable, ColumnsAlignAndLinesEndInNoSpace) {
  TextTable table({{"name", TextTable::Align::kLeft}, {"n", TextTable::Align::kRight}, {"", TextTable::Align::kLeft}});
  table.Add({"a", "10", ""});
  table.Add({"longer", "7", "note"});
  EXPECT_EQ(table.Text(1),
            " name     n\n"
            " a       10\n"
            " longer   7  note\n");
}

TEST(TextTable, WideCharactersCountOnce) {
  TextTable table({{"x", TextTable::Align::kLeft}, {"y", TextTable::Align::kLeft}});
  table.Add({"…", "1"});
  table.Add({"ab", "2"});
  EXPECT_EQ(table.Text(), "x   y\n…   1\nab  2\n");
}

TEST(TextTable, MissingCellsAreEmpty) {
  TextTable table({{"x", TextTable::Align::kLeft}, {"y", TextTable::Align::kRight}});
  table.Add({"a"});
  EXPECT_EQ(table.Text(), "x  y\na\n");
}

TEST(ShortNumber, NonFiniteZeroAndSizes) {
  EXPECT_EQ(ShortNumber(0), "0");
  EXPECT_EQ(ShortNumber(std::nan("")), "NaN");
  EXPECT_EQ(ShortNumber(-std::numeric_limits<double>::infinity()), "-Inf");
  EXPECT_EQ(ShortNumber(1.0), "1");
  EXPECT_EQ(ShortNumber(-0.25), "-0.25");
  EXPECT_EQ(ShortNumber(1.5e-7), "1.50e-07");
}

TEST(RangesText, LongListsAreCut) {
  EXPECT_EQ(RangesText({{0, 11}, {14, 14}}), "0-11,14");
  EXPECT_EQ(RangesText({{1, 1}, {3, 3}, {5, 5}}, 2), "1,3…(1 more)");
  EXPECT_EQ(RangesText({}), "");
}

TEST(HexKey, SixteenDigits) { EXPECT_EQ(HexKey(0xabc), "0000000000000abc"); }

TEST(TextTable, ControlCharactersOfNamesDoNotReachTheTerminal) {
  TextTable table({{"site", TextTable::Align::kLeft}, {"n", TextTable::Align::kRight}});
  table.Add({"a\nb\t\x1b[31m\x7f\xc3\xbc", "1"});
  EXPECT_EQ(table.Text(), "site                 n\na\\nb\\t\\x1b[31m\\x7f\xc3\xbc  1\n");
  EXPECT_EQ(Printable("x\ny\x1b", true), "x\ny\\x1b");
  // U+009B begins a sequence as ESC [ does; letters behind the same lead byte stay.
  EXPECT_EQ(Printable("\xc2\x9b\xc2\xb5", false), "\\xc2\\x9b\xc2\xb5");
  EXPECT_EQ(Printable("a\u202eb\u2066c\u2067\u20ac", false), "a\\xe2\\x80\\xaeb\\xe2\\x81\\xa6c\\xe2\\x81\\xa7\u20ac");
}

TEST(OneLine, EscapesControlCharactersAndCutsBetweenCharacters) {
  EXPECT_EQ(OneLine("a\nb\x1b[2J"), "a\\nb\\x1b[2J");
  const std::string whole(kMaxLineBytes, 'x');
  EXPECT_EQ(OneLine(whole), whole);
  EXPECT_EQ(OneLine(whole + "y"), whole + "…");
  const std::string almost(kMaxLineBytes - 1, 'x');
  EXPECT_EQ(OneLine(almost + "ü"), almost + "…");  // its second byte does not fit
}

}  // namespace
}  // namespace assay
