// Error values. Nothing in assay throws across a module boundary: a function that can fail returns
// Status or Result<T>, and the code decides the exit status of the command line (docs/cli.md).
// A message says what happened, where (file, offset, tensor, rank) and what to do next.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace assay {

// The numbers are the exit codes of the CLI and the return codes of the C ABI; they are never reused.
enum class Code : uint8_t {
  kOk = 0,
  kUsage = 2,        // the caller asked for something that does not exist or does not fit
  kBadInput = 3,     // a file, trace or tensor is damaged, hostile or cannot be compared
  kEnvironment = 4,  // the machine refused: disk full, no permission, missing library
  kInternal = 5,     // a fault of assay itself
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status Usage(std::string m) { return {Code::kUsage, std::move(m)}; }
  static Status BadInput(std::string m) { return {Code::kBadInput, std::move(m)}; }
  static Status Environment(std::string m) { return {Code::kEnvironment, std::move(m)}; }
  static Status Internal(std::string m) { return {Code::kInternal, std::move(m)}; }

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  // Empty when ok, and for an error of memory, where there was none left for a text.
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// A value or the Status that explains its absence. value() on an error is a programming fault.
template <class T>
class [[nodiscard]] Result {
 public:
  // A Result made from a Status must be given an error: it has no value.
  Result(T value) : value_(std::move(value)) {}          // NOLINT: implicit by design
  Result(Status status) : status_(std::move(status)) {}  // NOLINT: implicit by design

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return std::move(*value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }

 private:
  // Exactly one of the two says something: status_ is ok when there is a value.
  std::optional<T> value_;
  Status status_;
};

}  // namespace assay

// Returns the Status of expr from the enclosing function (which returns Status or a Result) unless it is OK.
#define ASSAY_RETURN_IF_ERROR(expr)                                                        \
  do {                                                                                     \
    if (::assay::Status assay_status_ = (expr); !assay_status_.ok()) return assay_status_; \
  } while (0)

#define ASSAY_CONCAT_(a, b) a##b
#define ASSAY_CONCAT(a, b) ASSAY_CONCAT_(a, b)
// ASSAY_ASSIGN_OR_RETURN(auto x, F()); returns F's Status from the enclosing function on failure.
#define ASSAY_ASSIGN_OR_RETURN(lhs, expr) ASSAY_ASSIGN_OR_RETURN_(ASSAY_CONCAT(assay_result_, __LINE__), lhs, expr)
#define ASSAY_ASSIGN_OR_RETURN_(tmp, lhs, expr) \
  auto tmp = (expr);                            \
  if (!tmp.ok()) return tmp.status();           \
  lhs = std::move(tmp).value()
