#include "io/json.h"

#include <cmath>
#include <exception>
#include <iterator>
#include <unordered_set>
#include <vector>

#include "base/json_writer.h"
#include "base/terminal_controls.h"

namespace assay {
namespace {

// A pointer that also tells a third party how far the lexer has read: the SAX events carry no position of their own.
class TrackedPointer {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  TrackedPointer(const char* at, const char** reached) : at_(at), reached_(reached) {}
  reference operator*() const { return *at_; }
  TrackedPointer& operator++() {
    *reached_ = ++at_;
    return *this;
  }
  TrackedPointer operator++(int) {
    TrackedPointer before = *this;
    ++*this;
    return before;
  }
  bool operator==(const TrackedPointer& other) const { return at_ == other.at_; }
  bool operator!=(const TrackedPointer& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  const char** reached_;
};

// Builds the document from the parser's events, refusing what the library would accept.
class Builder final : public nlohmann::json_sax<Json> {
 public:
  explicit Builder(Json* root) : root_(root) {}

  bool null() override { return Add(nullptr); }
  bool boolean(bool value) override { return Add(value); }
  bool number_integer(number_integer_t value) override { return Add(value); }
  bool number_unsigned(number_unsigned_t value) override { return Add(value); }
  bool number_float(number_float_t value, const string_t&) override { return Add(value); }
  bool string(string_t& value) override { return Add(std::move(value)); }
  bool binary(binary_t&) override { return Fail("binary value"); }
  bool start_object(std::size_t) override { return Open(Json::object()); }
  bool end_object() override { return Close(); }
  bool start_array(std::size_t) override { return Open(Json::array()); }
  bool end_array() override { return Close(); }

  // The library would keep one of two members of the same name, and other readers the other.
  bool key(string_t& value) override {
    if (!open_.back().keys.insert(value).second) return Fail("duplicate key \"" + value + "\"");
    open_.back().key = std::move(value);
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    position_ = position > 0 ? position - 1 : 0;
    // "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error ...": the reason alone.
    std::string text = error.what();
    const size_t bracket = text.find("] ");
    if (bracket != std::string::npos) text.erase(0, bracket + 2);
    const size_t colon = text.find(": ");
    if (colon != std::string::npos && text.rfind("parse error", 0) == 0) text.erase(0, colon + 2);
    return Fail(text);
  }

  const std::string& error() const { return error_; }
  // Offset of a syntax error; npos when the fault was found by this class.
  size_t position() const { return position_; }

 private:
  // An object or array that is still open, with the keys that it has so far.
  struct Container {
    Json* json;
    std::string key;  // of the next member
    std::unordered_set<std::string> keys;
  };

  // The first error is the one that is told.
  bool Fail(std::string why) {
    if (error_.empty()) error_ = std::move(why);
    return false;
  }

  // Puts a value where it belongs and gives its place in the document.
  Json* Place(Json value) {
    if (open_.empty()) {
      *root_ = std::move(value);
      return root_;
    }
    Container& top = open_.back();
    if (top.json->is_array()) {
      top.json->get_ref<Json::array_t&>().push_back(std::move(value));
      return &top.json->back();
    }
    // Appended to the ordered map's own vector: its emplace would search all earlier keys.
    auto& members = top.json->get_ref<Json::object_t&>();
    using Base = Json::object_t::Container;
    // Distinct keys are key()'s business.
    static_cast<Base&>(members).emplace_back(std::move(top.key), std::move(value));
    return &members.back().second;
  }

  // Null, a Boolean, a number or a string; never fails.
  template <class V>
  bool Add(V&& value) {
    Place(Json(std::forward<V>(value)));
    return true;
  }

  // The depth is bounded here, before the parser's and WriteJson's recursion could meet a deeper document.
  bool Open(Json empty) {
    if (open_.size() >= static_cast<size_t>(kMaxJsonDepth)) {
      return Fail("nested deeper than " + std::to_string(kMaxJsonDepth) + " levels");
    }
    Json* placed = Place(std::move(empty));
    open_.push_back({placed, {}, {}});  // stays valid: a container's parent gets no sibling before it is closed
    return true;
  }

  bool Close() {
    open_.pop_back();
    return true;
  }

  Json* root_;
  std::vector<Container> open_;
  std::string error_;
  size_t position_ = std::string::npos;
};

// Looked for first, as copying a document only to write it would double the memory of the usual case.
bool HasNonFinite(const Json& json) {
  if (json.is_number_float()) return !std::isfinite(json.get<double>());
  if (json.is_structured()) {
    for (const Json& child : json) {
      if (HasNonFinite(child)) return true;
    }
  }
  return false;
}

// Recursion is as deep as the document: built by us, or read with at most kMaxJsonDepth levels.
void MendNonFinite(Json* json) {
  if (json->is_number_float()) *json = JsonNumber(json->get<double>());
  if (json->is_structured()) {
    for (Json& child : *json) MendNonFinite(&child);
  }
}

}  // namespace

Result<Json> ParseJson(std::string_view text, std::string_view what, uint64_t base_offset) {
  Json root;
  Builder builder(&root);
  // Moves with the copies of the iterator that the lexer makes, which is why it lives out here.
  const char* reached = text.data();
  const char* end = text.data() + text.size();
  bool parsed = false;
  std::string failure;
  try {
    // The SAX interface returns false at a fault and does not throw for one.
    parsed = Json::sax_parse(TrackedPointer(text.data(), &reached), TrackedPointer(end, &reached), &builder);
  } catch (const std::exception& e) {  // out of memory
    failure = e.what();
  }
  if (parsed) return root;
  // The library's position where it found the fault; the lexer's where this file did.
  const size_t position =
      builder.position() != std::string::npos ? builder.position() : static_cast<size_t>(reached - text.data());
  if (failure.empty()) failure = builder.error();
  return Status::BadInput(std::string(what) + ": invalid JSON at byte " + std::to_string(base_offset + position) +
                          ": " + failure);
}

namespace {

// Outside of strings JSON is ASCII, so that every such character stands in one.
std::string EscapeControls(std::string json) {
  if (json.find_first_of("\xc2\xe2") == std::string::npos) return json;  // nearly always
  std::string out;
  for (size_t i = 0; i < json.size();) {
    unsigned code = 0;
    const size_t length = TerminalControl(std::string_view(json).substr(i, 3), &code);
    if (length == 0) {
      out += json[i++];
      continue;
    }
    AppendJsonEscape(code, &out);
    i += length;
  }
  return out;
}

}  // namespace

// Text that is no UTF-8 (names of files) gets U+FFFD in place of the bad bytes, where dump would throw.
std::string WriteJson(const Json& json, int indent) {
  constexpr auto kReplace = Json::error_handler_t::replace;
  if (!HasNonFinite(json)) return EscapeControls(json.dump(indent, ' ', false, kReplace));
  Json mended = json;
  MendNonFinite(&mended);
  return EscapeControls(mended.dump(indent, ' ', false, kReplace));
}

// As text, which docs/json.md promises: JSON has no NaN and no infinities, and null would read as absent.
Json JsonNumber(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

// Linear: objects that are asked this way have few keys.
const Json* FindKey(const Json& json, std::string_view key) {
  if (!json.is_object()) return nullptr;
  for (const auto& [name, value] : json.get_ref<const Json::object_t&>()) {
    if (name == key) return &value;
  }
  return nullptr;
}

}  // namespace assay
