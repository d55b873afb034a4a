// Shell-like patterns over names: what to record, which sites to show, which tolerance holds. One meaning for all.
#pragma once

#include <string_view>

namespace assay {

// Over the whole text: * any characters (dots too), ? one, [a-z] and [!a-z] (also [^a-z]) sets. A set that is not
// closed is text.
bool GlobMatches(std::string_view pattern, std::string_view text);

}  // namespace assay
