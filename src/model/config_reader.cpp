#include "model/config_reader.h"

#include <cmath>

namespace assay {

// null counts as absent: transformers writes it for keys that a model does not use.
const Json* ConfigReader::find(std::string_view key) {
  known_.emplace(key);
  const Json* value = FindKey(object_, key);
  return value != nullptr && !value->is_null() ? value : nullptr;
}

// The value is quoted, cut to 120 characters: configs can hold lists of thousands.
void ConfigReader::Refuse(std::string_view key, const std::string& why) {
  if (!status_.ok()) return;
  const Json* value = FindKey(object_, key);
  std::string text = value != nullptr ? WriteJson(*value, -1) : "(absent)";
  if (text.size() > 120) text = text.substr(0, 117) + "...";
  status_ = Status::BadInput(where_ + ": key \"" + std::string(key) + "\" = " + text + ": " + why);
}

// The first error stays; readers go on with a value in range, so that no caller has to look in between.
void ConfigReader::Missing(std::string_view key) {
  if (!status_.ok()) return;
  status_ = Status::BadInput(where_ + ": key \"" + std::string(key) + "\" is missing; " + family_ +
                             " has no default for it: add it to the file or give it as an override");
}

// Bounds are exact as doubles up to 2^53, and no caller's bound is larger.
int64_t ConfigReader::Int(std::string_view key, int64_t low, int64_t high) {
  if (find(key) == nullptr) {
    Missing(key);
    return low;
  }
  return Int(key, low, high, low);
}

// An absent value is not held against the bounds: 0 or -1 often means "none".
int64_t ConfigReader::Int(std::string_view key, int64_t low, int64_t high, int64_t absent) {
  const Json* value = find(key);
  if (value == nullptr) return absent;
  // Some writers store whole numbers as 64.0.
  double number = 0;
  if (value->is_number_integer() || value->is_number_float()) number = value->get<double>();
  if (!value->is_number() || number != std::floor(number)) {
    Refuse(key, "expected an integer");
    return absent;
  }
  if (number < static_cast<double>(low) || number > static_cast<double>(high)) {
    Refuse(key, "outside " + std::to_string(low) + " .. " + std::to_string(high));
    return absent;
  }
  return value->is_number_float() ? static_cast<int64_t>(number) : value->get<int64_t>();
}

double ConfigReader::Number(std::string_view key, double low, double high) {
  if (find(key) == nullptr) {
    Missing(key);
    return low;
  }
  return Number(key, low, high, low);
}

double ConfigReader::Number(std::string_view key, double low, double high, double absent) {
  const Json* value = find(key);
  if (value == nullptr) return absent;
  if (!value->is_number()) {
    Refuse(key, "expected a number");
    return absent;
  }
  const double number = value->get<double>();
  if (!(number >= low && number <= high)) {
    Refuse(key, "outside " + WriteJson(Json(low), -1) + " .. " + WriteJson(Json(high), -1));
    return absent;
  }
  return number;
}

// 0 and 1 are refused: a key that is a number in one release may mean something else.
bool ConfigReader::Bool(std::string_view key, bool absent) {
  const Json* value = find(key);
  if (value == nullptr) return absent;
  if (!value->is_boolean()) {
    Refuse(key, "expected true or false");
    return absent;
  }
  return value->get<bool>();
}

std::string ConfigReader::String(std::string_view key, std::string_view absent) {
  const Json* value = find(key);
  if (value == nullptr) return std::string(absent);
  if (!value->is_string()) {
    Refuse(key, "expected a string");
    return std::string(absent);
  }
  return value->get<std::string>();
}

std::vector<std::string> ConfigReader::Strings(std::string_view key) {
  std::vector<std::string> strings;
  const Json* value = find(key);
  if (value == nullptr) return strings;
  bool good = value->is_array();
  if (good) {
    for (const Json& entry : *value) {
      good = good && entry.is_string();
      if (good) strings.push_back(entry.get<std::string>());
    }
  }
  if (!good) Refuse(key, "expected a list of strings");
  return strings;
}

// One number or a list: eos_token_id comes as both. Numbers from 2^63 on read as negative and are
// refused with them.
std::vector<int64_t> ConfigReader::Ints(std::string_view key, std::vector<int64_t> absent) {
  const Json* value = find(key);
  if (value == nullptr) return absent;
  std::vector<int64_t> ints;
  const auto add = [&](const Json& entry) {
    if (!entry.is_number_integer() || entry.get<int64_t>() < 0) return false;
    ints.push_back(entry.get<int64_t>());
    return true;
  };
  bool good = true;
  if (value->is_array()) {
    for (const Json& entry : *value) good = good && add(entry);
  } else {
    good = add(*value);
  }
  if (!good) Refuse(key, "expected an integer >= 0 or a list of them");
  return ints;
}

// Keys that need no reading, so that unknown() does not list them.
void ConfigReader::Known(std::initializer_list<std::string_view> keys) {
  for (const std::string_view key : keys) known_.emplace(key);
}

// In the file's order.
std::vector<std::string> ConfigReader::unknown() const {
  std::vector<std::string> names;
  for (const auto& [name, value] : object_.get_ref<const Json::object_t&>()) {
    if (known_.count(name) == 0) names.push_back(name);
  }
  return names;
}

}  // namespace assay
