// Arming from outside: what another process writes into the control page, and what becomes of the file.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "base/files.h"
#include "probe/control.h"

namespace assay {
namespace {

class Control : public ::testing::Test {
 protected:
  void SetUp() override {
    char text[] = "/tmp/assay-control-XXXXXX";
    ASSERT_NE(::mkdtemp(text), nullptr);
    dir_ = text;
    char host[256] = {};
    ::gethostname(host, sizeof(host) - 1);
    host_ = host;
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  std::string dir_, host_;
};

// The page is shared memory: what the child writes is seen here without a call.
TEST_F(Control, AnotherProcessArmsNarrowsAndDisarms) {
  const auto here = ArmSwitch::Create(dir_, host_, false);
  ASSERT_NE(here, nullptr);
  EXPECT_FALSE(here->armed());
  Selection wanted;
  wanted.has_steps = true;
  wanted.steps.ranges = {{3, 4}, {9, INT64_MAX}};
  wanted.requests = {7, 11};
  const pid_t child = ::fork();
  if (child == 0) {
    const auto found = FindControlFiles(dir_);
    ::_exit(found.ok() && found->size() == 1 && WriteControl((*found)[0], true, wanted).problem.empty() ? 0 : 1);
  }
  int state = 0;
  ASSERT_EQ(::waitpid(child, &state, 0), child);
  EXPECT_EQ(WEXITSTATUS(state), 0);
  EXPECT_TRUE(here->armed());
  const Selection& seen = here->selection();
  EXPECT_TRUE(seen.has_steps);
  EXPECT_EQ(seen.steps.ranges, wanted.steps.ranges);
  EXPECT_TRUE(seen.wants_request(11));
  EXPECT_FALSE(seen.wants_request(8));
  EXPECT_TRUE(WriteControl(here->path(), false, {}).was_armed);
  EXPECT_FALSE(here->armed());
  EXPECT_TRUE(here->selection().has_steps) << "disarming leaves the selection alone";
}

// Any process of this user may write the page: counts beyond the arrays must not be believed.
TEST_F(Control, ForgedCountsAreBounded) {
  const auto here = ArmSwitch::Create(dir_, host_, true);
  auto* page = static_cast<ControlPage*>(here->page());
  page->has_steps = 1;
  page->n_steps = UINT32_MAX;
  page->n_requests = UINT32_MAX;
  page->generation += 2;
  EXPECT_EQ(here->selection().steps.ranges.size(), kControlSteps);
  EXPECT_EQ(here->selection().requests.size(), kControlRequests);
}

// An odd generation: the writer is in the middle; the selection of before stays.
TEST_F(Control, APageThatIsBeingWrittenIsNotRead) {
  const auto here = ArmSwitch::Create(dir_, host_, true);
  auto* page = static_cast<ControlPage*>(here->page());
  page->n_requests = 1;
  page->requests[0] = 5;
  page->generation += 1;
  EXPECT_TRUE(here->selection().requests.empty());
  page->generation += 1;
  EXPECT_EQ(here->selection().requests, std::vector<uint64_t>{5});
}

TEST_F(Control, TheFileGoesWithTheRecordingAndARemovedOneHarmsNothing) {
  auto here = ArmSwitch::Create(dir_, host_, true);
  ASSERT_TRUE(FileExists(here->path()));
  const std::string path = here->path();
  std::filesystem::remove(path);
  here->arm(false);
  EXPECT_FALSE(here->armed());
  here.reset();
  EXPECT_TRUE(std::filesystem::is_empty(dir_));
}

TEST_F(Control, AFolderThatCannotBeWrittenLeavesArmingToTheProcess) {
  const auto here = ArmSwitch::Create(dir_ + "/nowhere", host_, true);
  ASSERT_NE(here, nullptr);
  EXPECT_TRUE(here->path().empty());
  EXPECT_TRUE(here->armed());
  here->arm(false);
  EXPECT_FALSE(here->armed());
}

// The mapping is shared across fork, so the child takes a page of its own.
TEST_F(Control, AChildOfForkIsArmedApartFromItsParent) {
  const auto here = ArmSwitch::Create(dir_, host_, true);
  const pid_t child = ::fork();
  if (child == 0) {
    here->Renew();
    here->arm(false);
    ::_exit(!here->armed() && here->path() != "" ? 0 : 1);
  }
  int state = 0;
  ASSERT_EQ(::waitpid(child, &state, 0), child);
  EXPECT_EQ(WEXITSTATUS(state), 0);
  EXPECT_TRUE(here->armed());
}

TEST_F(Control, AnotherHostsOrEndedOrForeignFileIsRefusedWithItsReason) {
  const auto here = ArmSwitch::Create(dir_, host_, true);
  auto* page = static_cast<ControlPage*>(here->page());
  std::strcpy(page->host, "elsewhere");
  EXPECT_NE(WriteControl(here->path(), false, {}).problem.find("host elsewhere"), std::string::npos);
  page->version = 1;
  EXPECT_NE(WriteControl(here->path(), false, {}).problem.find("version"), std::string::npos);
  EXPECT_TRUE(here->armed());
  const std::string small = dir_ + "/small.control";
  ASSERT_TRUE(AtomicWriteFile(small, "x").ok());
  EXPECT_EQ(WriteControl(small, true, {}).problem, "no control file");
  EXPECT_FALSE(FindControlFiles(dir_ + "/none").ok());
  EXPECT_EQ(FindControlFiles("0").status().code(), Code::kBadInput);  // else: everything that records
}

}  // namespace
}  // namespace assay
