#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "base/version.h"
#include "cli/run_program.h"
#include "io/json.h"

namespace assay::testing {
namespace {

Json Parse(const std::string& text) {
  Result<Json> json = ParseJson(text, "stdout");
  EXPECT_TRUE(json.ok()) << json.status().message() << "\n" << text;
  return json.ok() ? *json : Json();
}

bool CheckOk(const Json& doctor, const std::string& name) {
  for (const Json& check : doctor["checks"]) {
    if (check["name"] == name) return check["ok"];
  }
  ADD_FAILURE() << "no check named " << name;
  return false;
}

TEST(Doctor, HealthyMachineExitsZero) {
  const Output run = RunAssay({"doctor", "--json"});
  ASSERT_EQ(run.exit_code, 0) << run.out << run.err;
  const Json doctor = Parse(run.out);
  EXPECT_EQ(doctor["schema"], "assay.doctor/1");
  EXPECT_EQ(doctor["version"], ASSAY_VERSION);
  EXPECT_TRUE(doctor["ok"]);
  EXPECT_GT(doctor["machine"]["cores_usable"], 0);
  EXPECT_GT(doctor["machine"]["memory_bytes"], 0);
  // The portable kernels are usable everywhere, and what is active is one of the usable ones.
  const Json& usable = doctor["isa"]["usable"];
  EXPECT_NE(std::find(usable.begin(), usable.end(), "portable"), usable.end());
  EXPECT_NE(std::find(usable.begin(), usable.end(), doctor["isa"]["active"]), usable.end());
  EXPECT_GT(doctor["trace_folder"]["free_bytes"], 0);
}

TEST(Doctor, TextSaysTheSame) {
  const Output run = RunAssay({"doctor"});
  EXPECT_EQ(run.exit_code, 0);
  EXPECT_EQ(run.out.rfind("assay " ASSAY_VERSION "\n", 0), 0u) << run.out;
  EXPECT_EQ(run.out.find("BROKEN"), std::string::npos) << run.out;
}

TEST(Doctor, ForcedInstructionSetIsActive) {
  const Output run = RunAssay({"doctor", "--json"}, {"ASSAY_ISA=portable"});
  EXPECT_EQ(run.exit_code, 0);
  EXPECT_EQ(Parse(run.out)["isa"]["active"], "portable");
}

TEST(Doctor, UnknownInstructionSetIsBroken) {
  const Output run = RunAssay({"doctor", "--json"}, {"ASSAY_ISA=avx3"});
  EXPECT_EQ(run.exit_code, 4);
  EXPECT_FALSE(CheckOk(Parse(run.out), "kernels"));
}

TEST(Doctor, MisspeltSettingIsBroken) {
  const Output run = RunAssay({"doctor", "--json"}, {"ASSAY_LAYRES=1"});
  EXPECT_EQ(run.exit_code, 4);
  EXPECT_FALSE(CheckOk(Parse(run.out), "settings"));
  EXPECT_NE(run.out.find("ASSAY_LAYERS"), std::string::npos) << "the nearest name is not said: " << run.out;
}

// A path below a file can never become a folder, also for root.
TEST(Doctor, UnusableTraceFolderIsBroken) {
  const std::string file = (std::filesystem::temp_directory_path() / "assay-doctor-file-XXXXXX").string();
  std::string path = file;
  const int fd = mkstemp(path.data());
  ASSERT_GE(fd, 0);
  close(fd);
  const Output run = RunAssay({"doctor", "--json"}, {"ASSAY_DIR=" + path + "/trace"});
  EXPECT_EQ(run.exit_code, 4);
  EXPECT_FALSE(CheckOk(Parse(run.out), "trace folder"));
  EXPECT_NE(run.out.find(path), std::string::npos);
  unlink(path.c_str());
}

TEST(Doctor, FullStdoutIsAnEnvironmentError) {
  if (access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full here";
  const std::string command = std::string(ASSAY_BINARY_DIR) + "/assay doctor > /dev/full 2>/dev/null";
  const int status = std::system(command.c_str());
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 4);
}

}  // namespace
}  // namespace assay::testing
