// The bytes twice: as tokenizer.json (what is accepted must encode and decode), and as text for a small tokenizer of
// this file (what is UTF-8 survives the round trip, and its split covers it).
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "io/json.h"
#include "model/text_split.h"
#include "model/tokenizer.h"

namespace {

// All 256 byte symbols, a few merges, one added token.
std::unique_ptr<assay::Tokenizer> Small() {
  using assay::Json;
  Json vocab = Json::object(), merges = Json::array();
  int id = 0;
  char32_t next = 0x100;
  for (char32_t b = 0; b < 256; ++b) {
    const bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
    std::string symbol;
    assay::AppendUtf8(printable ? b : next++, &symbol);
    vocab[symbol] = id++;
  }
  const std::vector<std::pair<const char*, const char*>> pairs = {
      {"t", "h"}, {"th", "e"}, {"a", "a"}, {"aa", "aa"}, {"\u0120", "the"}};
  for (const auto& [left, right] : pairs) {
    vocab[std::string(left) + right] = id++;
    merges.push_back({left, right});
  }
  Json json = {{"added_tokens", Json::array()},
               {"normalizer", nullptr},
               {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
               {"decoder", {{"type", "ByteLevel"}}},
               {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}}}};
  json["added_tokens"].push_back({{"id", id}, {"content", "<|x|>"}, {"special", true}});
  auto parsed = assay::Tokenizer::Parse(assay::WriteJson(json), "small");
  if (!parsed.ok()) std::abort();
  return std::move(parsed).value();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto loaded = assay::Tokenizer::Parse(bytes, "input");
  if (loaded.ok()) {
    const auto ids = (*loaded)->Encode("In the beginning, 12  \n's \u00e9");
    if (!ids.ok()) std::abort();
    (void)(*loaded)->Decode(*ids, true);
  } else if (loaded.status().message().compare(0, 7, "input: ") != 0) {
    std::abort();
  }

  static const std::unique_ptr<assay::Tokenizer> small = Small();
  const auto ids = small->Encode(bytes);
  if (!ids.ok()) return 0;
  if (small->Decode(*ids, false) != bytes) std::abort();
  size_t covered = 0;
  for (const std::string_view piece : assay::SplitByteLevel(bytes)) {
    if (piece.empty()) std::abort();
    covered += piece.size();
  }
  if (covered != size) std::abort();
  return 0;
}
