#include "model/tokenizer.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <queue>
#include <unordered_map>
#include <utility>

#include "base/files.h"
#include "io/json.h"
#include "io/text_file.h"
#include "model/text_split.h"

namespace assay {
namespace {

// Vocabularies of 256 thousand tokens have files of some 30 MB.
constexpr uint64_t kMaxFileBytes = 256u << 20;
constexpr int64_t kMaxId = int64_t{1} << 24;

// The alphabet of byte-level BPE: printable Latin-1 bytes stand for themselves, the other 68 are code points from
// U+0100 on, in order.
std::array<char32_t, 256> ByteAlphabet() {
  std::array<char32_t, 256> alphabet{};
  char32_t next = 0x100;
  for (char32_t b = 0; b < 256; ++b) {
    const bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
    alphabet[b] = printable ? b : next++;
  }
  return alphabet;
}

// Matched in the text before it is split; special: left out by Decode when asked.
struct AddedToken {
  std::string content;
  int64_t id = 0;
  bool special = false;
};

// A merge of two neighbouring symbols: the lower its rank, the sooner.
struct Merge {
  int64_t rank = 0, id = 0;
};

// Ids are below kMaxId = 2^24, so both fit.
uint64_t PairKey(int64_t left, int64_t right) {
  return (static_cast<uint64_t>(left) << 32) | static_cast<uint64_t>(right);
}

// The "type" of a component, as tokenizer.json names its variants.
std::string TypeOf(const Json& object) {
  const Json* type = FindKey(object, "type");
  return type != nullptr && type->is_string() ? type->get<std::string>() : "(no type)";
}

// Boolean option of an object; `absent` when it is not there or no boolean.
bool Flag(const Json& object, std::string_view key, bool absent) {
  const Json* value = FindKey(object, key);
  return value != nullptr && value->is_boolean() ? value->get<bool>() : absent;
}

bool IsAbsent(const Json* value) { return value == nullptr || value->is_null(); }

}  // namespace

struct Tokenizer::Impl {
  std::string what;
  std::unordered_map<std::string, int64_t> ids;       // token in the byte alphabet -> id
  std::unordered_map<int64_t, std::string> contents;  // id -> bytes it stands for
  std::unordered_map<int64_t, bool> special;          // of the added tokens
  std::vector<AddedToken> added;                      // longest first
  std::unordered_map<uint64_t, Merge> merges;
  std::array<int64_t, 256> byte_ids{};
  std::vector<int64_t> before, after;  // what TemplateProcessing puts around the text
  int64_t vocab_size = 0;

  Status Bad(const std::string& why) const { return Status::BadInput(what + ": " + why); }
  // A feature that would change ids and is not implemented, with what to do instead.
  Status NotRead(const std::string& feature) const {
    return Bad(feature + " is not read natively: pass token ids with --tokens");
  }

  Status ReadShape(const Json& root) const;
  Status ReadVocab(const Json& model);
  Status ReadMerges(const Json& model);
  Status ReadAdded(const Json& root);
  Status ReadTemplate(const Json& root);
  void EncodePiece(std::string_view piece, std::vector<int64_t>* out) const;
  void EncodePlain(std::string_view text, std::vector<int64_t>* out) const;
};

// Refuses by name whatever would change ids and is not implemented.
Status Tokenizer::Impl::ReadShape(const Json& root) const {
  for (const char* key : {"truncation", "padding", "normalizer"}) {
    if (!IsAbsent(FindKey(root, key))) return NotRead(std::string("\"") + key + "\"");
  }
  const Json* model = FindKey(root, "model");
  if (model == nullptr || !model->is_object()) return Bad("key \"model\" is missing or no object");
  if (TypeOf(*model) != "BPE") return NotRead("model type " + TypeOf(*model));
  for (const char* key : {"dropout", "unk_token"}) {
    if (!IsAbsent(FindKey(*model, key))) return NotRead(std::string("BPE option \"") + key + "\"");
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const Json* value = FindKey(*model, key);
    if (!IsAbsent(value) && *value != "") return NotRead(std::string("BPE option \"") + key + "\"");
  }
  for (const char* key : {"byte_fallback", "ignore_merges"}) {
    if (Flag(*model, key, false)) return NotRead(std::string("BPE option \"") + key + "\"");
  }
  const Json* pre = FindKey(root, "pre_tokenizer");
  if (IsAbsent(pre)) return NotRead("a missing pre_tokenizer");
  if (TypeOf(*pre) != "ByteLevel") return NotRead("pre_tokenizer type " + TypeOf(*pre));
  if (Flag(*pre, "add_prefix_space", true)) return NotRead("pre_tokenizer option \"add_prefix_space\"");
  if (!Flag(*pre, "use_regex", true)) return NotRead("pre_tokenizer option \"use_regex\": false");
  const Json* decoder = FindKey(root, "decoder");
  if (IsAbsent(decoder)) return NotRead("a missing decoder");
  if (TypeOf(*decoder) != "ByteLevel") return NotRead("decoder type " + TypeOf(*decoder));
  return {};
}

// Every byte needs its symbol, else there would be texts without ids.
Status Tokenizer::Impl::ReadVocab(const Json& model) {
  const Json* vocab = FindKey(model, "vocab");
  if (vocab == nullptr || !vocab->is_object()) return Bad("key \"model.vocab\" is missing or no object");
  std::unordered_map<char32_t, char> byte_of;
  const auto alphabet = ByteAlphabet();
  for (size_t b = 0; b < 256; ++b) byte_of[alphabet[b]] = static_cast<char>(b);

  for (const auto& [token, value] : vocab->get_ref<const Json::object_t&>()) {
    if (!value.is_number_unsigned() || value.get<uint64_t>() >= static_cast<uint64_t>(kMaxId)) {
      return Bad("vocab entry \"" + token + "\": id " + WriteJson(value, -1) + " is out of range");
    }
    const int64_t id = value.get<int64_t>();
    // A token outside the alphabet (an added one) stands for its own text.
    std::string bytes;
    for (std::string_view rest = token; !rest.empty();) {
      const DecodedChar c = DecodeUtf8(rest);
      const auto byte = byte_of.find(c.code);
      if (byte == byte_of.end()) {
        bytes = token;
        break;
      }
      bytes.push_back(byte->second);
      rest.remove_prefix(static_cast<size_t>(c.size_bytes));
    }
    if (!contents.emplace(id, std::move(bytes)).second) {
      return Bad("vocab entry \"" + token + "\": id " + std::to_string(id) + " is used twice");
    }
    ids.emplace(token, id);
    vocab_size = std::max(vocab_size, id + 1);
  }
  for (size_t b = 0; b < 256; ++b) {
    std::string symbol;
    AppendUtf8(alphabet[b], &symbol);
    const auto at = ids.find(symbol);
    if (at == ids.end()) return Bad("the vocabulary lacks the symbol of byte " + std::to_string(b));
    byte_ids[b] = at->second;
  }
  return {};
}

// The line's number is the merge's rank.
Status Tokenizer::Impl::ReadMerges(const Json& model) {
  const Json* list = FindKey(model, "merges");
  if (list == nullptr || !list->is_array()) return Bad("key \"model.merges\" is missing or no list");
  int64_t rank = 0;
  for (const Json& entry : *list) {
    const std::string where = "merge " + std::to_string(rank);
    std::string left, right;
    if (entry.is_string()) {  // older files: "left right"
      const std::string& text = entry.get_ref<const std::string&>();
      const size_t space = text.find(' ');
      if (space == std::string::npos) return Bad(where + " is no pair");
      left = text.substr(0, space);
      right = text.substr(space + 1);
    } else if (entry.is_array() && entry.size() == 2 && entry[0].is_string() && entry[1].is_string()) {
      left = entry[0].get<std::string>();
      right = entry[1].get<std::string>();
    } else {
      return Bad(where + " is no pair");
    }
    const auto l = ids.find(left), r = ids.find(right), joined = ids.find(left + right);
    if (l == ids.end() || r == ids.end() || joined == ids.end()) {
      return Bad(where + " (\"" + left + "\", \"" + right + "\") uses a token that is not in the vocabulary");
    }
    merges[PairKey(l->second, r->second)] = {rank++, joined->second};
  }
  return {};
}

// After the vocabulary and the merges: added tokens may repeat entries of the vocabulary, with the same id only.
Status Tokenizer::Impl::ReadAdded(const Json& root) {
  const Json* list = FindKey(root, "added_tokens");
  if (IsAbsent(list)) return {};
  if (!list->is_array()) return Bad("key \"added_tokens\" is no list");
  for (const Json& entry : *list) {
    const Json* content = FindKey(entry, "content");
    const Json* id = FindKey(entry, "id");
    if (content == nullptr || !content->is_string() || content->get_ref<const std::string&>().empty() ||
        id == nullptr || !id->is_number_unsigned() || id->get<uint64_t>() >= static_cast<uint64_t>(kMaxId)) {
      return Bad("added token " + WriteJson(entry, -1) + " has no usable content and id");
    }
    AddedToken token{content->get<std::string>(), id->get<int64_t>(), Flag(entry, "special", false)};
    for (const char* option : {"single_word", "lstrip", "rstrip"}) {
      if (Flag(entry, option, false)) {
        return NotRead("option \"" + std::string(option) + "\" of added token \"" + token.content + "\"");
      }
    }
    const auto known = ids.find(token.content);
    const bool id_taken = contents.count(token.id) != 0;
    if ((known != ids.end() && known->second != token.id) || (known == ids.end() && id_taken)) {
      return Bad("added token \"" + token.content + "\": id " + std::to_string(token.id) +
                 " contradicts the vocabulary");
    }
    ids[token.content] = token.id;
    contents[token.id] = token.content;
    special[token.id] = token.special;
    vocab_size = std::max(vocab_size, token.id + 1);
    added.push_back(std::move(token));
  }
  std::stable_sort(added.begin(), added.end(),
                   [](const AddedToken& a, const AddedToken& b) { return a.content.size() > b.content.size(); });
  return {};
}

// Tokens before and behind the text (BOS, EOS).
Status Tokenizer::Impl::ReadTemplate(const Json& root) {
  const Json* post = FindKey(root, "post_processor");
  if (IsAbsent(post) || TypeOf(*post) == "ByteLevel") return {};  // ByteLevel changes offsets alone
  if (TypeOf(*post) != "TemplateProcessing") return NotRead("post_processor type " + TypeOf(*post));
  const Json* single = FindKey(*post, "single");
  const Json* specials = FindKey(*post, "special_tokens");
  if (single == nullptr || !single->is_array()) return Bad("post_processor: \"single\" is missing or no list");
  bool seen_text = false;
  for (const Json& piece : *single) {
    if (FindKey(piece, "Sequence") != nullptr) {
      if (seen_text) return NotRead("a template that repeats the text");
      seen_text = true;
      continue;
    }
    const Json* token = FindKey(piece, "SpecialToken");
    const Json* name = token != nullptr ? FindKey(*token, "id") : nullptr;
    if (name == nullptr || !name->is_string()) return Bad("post_processor: template piece " + WriteJson(piece, -1));
    const Json* entry = specials != nullptr ? FindKey(*specials, name->get<std::string>()) : nullptr;
    const Json* token_ids = entry != nullptr ? FindKey(*entry, "ids") : nullptr;
    if (token_ids == nullptr || !token_ids->is_array()) {
      return Bad("post_processor: special token " + WriteJson(*name, -1) + " has no ids");
    }
    for (const Json& id : *token_ids) {
      if (!id.is_number_unsigned() || id.get<uint64_t>() >= static_cast<uint64_t>(kMaxId)) {
        return Bad("post_processor: special token " + WriteJson(*name, -1) + ": id " + WriteJson(id, -1));
      }
      (seen_text ? after : before).push_back(id.get<int64_t>());
    }
  }
  if (!seen_text) return Bad("post_processor: the template has no place for the text");
  return {};
}

// Byte-pair encoding of one piece: symbols in a linked list, candidate merges in a queue by rank, then place. O(n log
// n) for a piece of n bytes, so that a long run of one letter is no attack.
void Tokenizer::Impl::EncodePiece(std::string_view piece, std::vector<int64_t>* out) const {
  struct Symbol {
    int64_t id;
    ptrdiff_t previous, next;
  };
  struct Candidate {
    int64_t rank;
    ptrdiff_t at;
    int64_t left, right, joined;
    bool operator<(const Candidate& other) const {  // the queue's top is its largest
      return std::pair(rank, at) > std::pair(other.rank, other.at);
    }
  };
  const ptrdiff_t n = static_cast<ptrdiff_t>(piece.size());
  std::vector<Symbol> symbols;
  symbols.reserve(piece.size());
  for (ptrdiff_t i = 0; i < n; ++i) {
    symbols.push_back(
        {byte_ids[static_cast<unsigned char>(piece[static_cast<size_t>(i)])], i - 1, i + 1 < n ? i + 1 : -1});
  }
  const auto symbol = [&](ptrdiff_t i) -> Symbol& { return symbols[static_cast<size_t>(i)]; };
  std::priority_queue<Candidate> queue;
  const auto offer = [&](ptrdiff_t at) {
    if (at < 0 || symbol(at).next < 0) return;
    const int64_t left = symbol(at).id, right = symbol(symbol(at).next).id;
    const auto merge = merges.find(PairKey(left, right));
    if (merge != merges.end()) queue.push({merge->second.rank, at, left, right, merge->second.id});
  };
  for (ptrdiff_t i = 0; i + 1 < n; ++i) offer(i);
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Symbol& left = symbol(top.at);
    // Stale when either side has been merged since: a merged-away symbol has id -1.
    if (left.id != top.left || left.next < 0 || symbol(left.next).id != top.right) continue;
    Symbol& right = symbol(left.next);
    left.id = top.joined;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) symbol(left.next).previous = top.at;
    offer(left.previous);
    offer(top.at);
  }
  for (ptrdiff_t i = n > 0 ? 0 : -1; i >= 0; i = symbol(i).next) out->push_back(symbol(i).id);
}

void Tokenizer::Impl::EncodePlain(std::string_view text, std::vector<int64_t>* out) const {
  for (const std::string_view piece : SplitByteLevel(text)) EncodePiece(piece, out);
}

Tokenizer::Tokenizer() : impl_(std::make_unique<Impl>()) {}
Tokenizer::~Tokenizer() = default;

Result<std::unique_ptr<Tokenizer>> Tokenizer::Parse(std::string_view json, std::string_view what) {
  ASSAY_ASSIGN_OR_RETURN(const Json root, ParseJson(json, what));
  std::unique_ptr<Tokenizer> tokenizer(new Tokenizer);
  Impl& impl = *tokenizer->impl_;
  impl.what = std::string(what);
  if (!root.is_object()) return impl.Bad("no JSON object");
  ASSAY_RETURN_IF_ERROR(impl.ReadShape(root));
  const Json& model = *FindKey(root, "model");
  ASSAY_RETURN_IF_ERROR(impl.ReadVocab(model));
  ASSAY_RETURN_IF_ERROR(impl.ReadMerges(model));
  ASSAY_RETURN_IF_ERROR(impl.ReadAdded(root));
  ASSAY_RETURN_IF_ERROR(impl.ReadTemplate(root));
  return tokenizer;
}

Result<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::string& path) {
  const std::string file = IsDirectory(path) ? path + "/tokenizer.json" : path;
  ASSAY_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(file, kMaxFileBytes));
  return Parse(text, file);
}

Result<std::vector<int64_t>> Tokenizer::Encode(std::string_view text) const {
  for (size_t at = 0; at < text.size();) {
    const DecodedChar c = DecodeUtf8(text.substr(at));
    if (!c.valid) return Status::Usage("text is not UTF-8 at byte " + std::to_string(at));
    at += static_cast<size_t>(c.size_bytes);
  }
  std::vector<int64_t> out = impl_->before;
  size_t plain = 0;  // start of the text since the last added token
  for (size_t at = 0; at < text.size();) {
    const AddedToken* found = nullptr;
    // Longest first, so the first that matches is the longest at this place.
    for (const AddedToken& token : impl_->added) {
      if (text.compare(at, token.content.size(), token.content) == 0) {
        found = &token;
        break;
      }
    }
    if (found == nullptr) {
      ++at;
      continue;
    }
    impl_->EncodePlain(text.substr(plain, at - plain), &out);
    out.push_back(found->id);
    plain = at += found->content.size();
  }
  impl_->EncodePlain(text.substr(plain), &out);
  out.insert(out.end(), impl_->after.begin(), impl_->after.end());
  return out;
}

// Bytes of all tokens are joined first: a character may be spread over several.
std::string Tokenizer::Decode(const std::vector<int64_t>& ids, bool skip_special) const {
  std::string bytes;
  for (const int64_t id : ids) {
    const auto special = impl_->special.find(id);
    if (skip_special && special != impl_->special.end() && special->second) continue;
    const auto content = impl_->contents.find(id);
    bytes += content != impl_->contents.end() ? content->second : "\xEF\xBF\xBD";
  }
  std::string text;
  for (std::string_view rest = bytes; !rest.empty();) {
    const DecodedChar c = DecodeUtf8(rest);
    AppendUtf8(c.code, &text);
    rest.remove_prefix(static_cast<size_t>(c.size_bytes));
  }
  return text;
}

int64_t Tokenizer::vocab_size() const { return impl_->vocab_size; }

}  // namespace assay
