// Fixture of the tests that compare two runs of a toy model.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "compare/diff.h"
#include "toy_model.h"

namespace assay::testing {

class DiffTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = ::testing::TempDir() + "/diff_" + ::testing::UnitTest::GetInstance()->current_test_info()->name() + "_" +
           std::to_string(getpid());
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  // Records both runs anew and compares them; a is the reference.
  DiffResult Compare(const ToyOptions& a, const ToyOptions& b, const DiffOptions& options = {}) {
    a_ = ToyModel::Run(dir_ + "/a", a);
    b_ = ToyModel::Run(dir_ + "/b", b);
    auto result = Diff(*a_, *b_, options);
    EXPECT_TRUE(result.ok()) << result.status().message();
    return result.ok() ? std::move(result).value() : DiffResult();
  }

  static std::string Describe(const DiffResult& r) {
    std::string out = r.summary;
    for (const FirstBad& f : r.findings) {
      out += "\n  " + f.name + " " + f.cls + " " + f.bound_basis;
      for (const std::string& e : f.evidence) out += "\n    " + e;
    }
    return out;
  }

  std::string dir_;
  std::unique_ptr<Trace> a_, b_;
};

}  // namespace assay::testing
