// Runs checks over a small trace, and what is expected of the result.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "check/check.h"
#include "small_trace.h"

namespace assay::testing {

// Closes the recording and runs the checks named in `only` on it; none named: all.
inline CheckResult Judge(SmallTrace& t, std::vector<std::string> only) {
  const auto capture = t.Open();
  auto result = RunChecks(*capture, {.only = std::move(only)});
  EXPECT_TRUE(result.ok()) << result.status().message();
  return std::move(result).value();
}

// The finding stands at a hypothesis of its own class; only name and class are asked for.
inline void ExpectNamed(const CheckResult& r, std::string_view name, std::string_view cls) {
  ASSERT_FALSE(r.findings.empty());
  EXPECT_EQ(r.findings[0].name, name);
  EXPECT_EQ(r.findings[0].cls, cls) << r.findings[0].evidence[0];
}

}  // namespace assay::testing

// The result has one finding first, with this name and class.
#define EXPECT_FIRST(result, expected_name, expected_class)      \
  do {                                                           \
    ASSERT_FALSE((result).findings.empty());                     \
    EXPECT_EQ((result).findings[0].name, expected_name);         \
    EXPECT_EQ((result).findings[0].cls, expected_class);         \
    EXPECT_EQ((result).ledger[0].state, CheckState::kConfirmed); \
  } while (false)
#define EXPECT_RULED_OUT(result)                                         \
  do {                                                                   \
    EXPECT_TRUE((result).findings.empty()) << (result).findings[0].name; \
    ASSERT_EQ((result).ledger.size(), 1u);                               \
    EXPECT_EQ((result).ledger[0].state, CheckState::kRuledOut);          \
  } while (false)
