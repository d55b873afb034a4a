// Two texts in two columns, for a terminal.
#pragma once

#include <string>
#include <string_view>

namespace assay::cli {

// Both texts wrapped to `width` characters a column, under their headings. Broken UTF-8 and control characters (garbage
// has both) are shown as '?' and as spaces, so that no text can disturb the terminal. Every line ends in a newline.
std::string SideBySide(std::string_view left_heading, std::string_view right_heading, std::string_view left,
                       std::string_view right, int width);

}  // namespace assay::cli
