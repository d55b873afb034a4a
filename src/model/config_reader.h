// Typed access to the keys of one JSON object with a sticky error: the first key that is missing, of the wrong type or
// out of range is reported, everything read after it has a default value. So a parser reads straight through and asks
// once at the end. null counts as absent, as it does in transformers.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "io/json.h"

namespace assay {

class ConfigReader {
 public:
  // object must outlive the reader. where: file, and the path of a nested object, for messages.
  ConfigReader(const Json& object, std::string where, std::string family)
      : object_(object), where_(std::move(where)), family_(std::move(family)) {}

  // The value, or nullptr when absent or null. Marks the key as known.
  const Json* find(std::string_view key);
  bool has(std::string_view key) { return find(key) != nullptr; }
  // The key is there, if only as null.
  bool present(std::string_view key) const { return FindKey(object_, key) != nullptr; }

  // An integer in [low, high]; the first form is an error when the key is absent.
  int64_t Int(std::string_view key, int64_t low, int64_t high);
  int64_t Int(std::string_view key, int64_t low, int64_t high, int64_t absent);
  // A finite number in [low, high].
  double Number(std::string_view key, double low, double high);
  double Number(std::string_view key, double low, double high, double absent);
  bool Bool(std::string_view key, bool absent);
  std::string String(std::string_view key, std::string_view absent);
  // A list of strings; empty when absent.
  std::vector<std::string> Strings(std::string_view key);
  // An integer or a list of integers, each >= 0; `absent` when absent.
  std::vector<int64_t> Ints(std::string_view key, std::vector<int64_t> absent);

  // Reports `key` as not usable: "FILE: key "k" = VALUE: WHY".
  void Refuse(std::string_view key, const std::string& why);
  void RefuseIf(bool condition, std::string_view key, const std::string& why) {
    if (condition) Refuse(key, why);
  }
  // Takes over the error of a reader of a nested object.
  void Adopt(const Status& status) {
    if (status_.ok()) status_ = status;
  }
  // Marks keys that this family reads nothing from as known.
  void Known(std::initializer_list<std::string_view> keys);
  // Keys of the object that nobody asked for.
  std::vector<std::string> unknown() const;

  const std::string& where() const { return where_; }
  const std::string& family() const { return family_; }
  const Status& status() const { return status_; }

 private:
  void Missing(std::string_view key);

  // Keys that were asked for, or named by Known.
  const Json& object_;
  std::string where_, family_;
  std::set<std::string, std::less<>> known_;
  Status status_;
};

}  // namespace assay
