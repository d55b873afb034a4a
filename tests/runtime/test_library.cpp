// What libassay.so needs and shows, as the linker sees it.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <memory>
#include <set>
#include <sstream>
#include <string>

namespace assay {
namespace {

std::string Output(const std::string& command) {
  std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen(command.c_str(), "r"), ::pclose);
  std::string out;
  std::array<char, 4096> buffer;
  while (pipe != nullptr && std::fgets(buffer.data(), buffer.size(), pipe.get()) != nullptr) out += buffer.data();
  return out;
}

TEST(Library, NeedsLibcAndThreadsAlone) {
  const std::string out = Output("readelf -d " ASSAY_LIBRARY_FILE);
  std::set<std::string> needed;
  std::istringstream lines(out);
  for (std::string line; std::getline(lines, line);) {
    if (line.find("(NEEDED)") == std::string::npos) continue;
    const size_t open = line.find('[');
    needed.insert(line.substr(open + 1, line.find(']') - open - 1));
  }
  EXPECT_EQ(needed.count("libc.so.6"), 1u) << out;
  for (const std::string& name : needed) {
    const bool allowed = name == "libc.so.6" || name == "libpthread.so.0" || name.find("ld-linux") == 0;
    EXPECT_TRUE(allowed) << name;
  }
}

TEST(Library, ExportsTheFunctionsOfItsHeaderAlone) {
  std::istringstream lines(Output("nm -D --defined-only " ASSAY_LIBRARY_FILE));
  int functions = 0;
  for (std::string line; std::getline(lines, line);) {
    const std::string name = line.substr(line.rfind(' ') + 1);
    EXPECT_EQ(name.find("assay_"), 0u) << name;
    ++functions;
  }
  // A new function is a new number here, and in the renaming block of assay.h; ten are our Python package's alone.
  EXPECT_EQ(functions, 20 + 10);
}

#if defined(__x86_64__)
// One load, nothing else: no call, no lock prefix, no second memory access.
TEST(Library, OffIsOneLoad) {
  std::istringstream lines(Output("objdump -d --no-show-raw-insn --disassemble=probe_off " ASSAY_PROBE_OFF_FILE));
  std::string body;
  bool inside = false;
  int instructions = 0, memory = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.find("<probe_off>:") != std::string::npos) {
      inside = true;
      continue;
    }
    if (!inside || line.find('\t') == std::string::npos) continue;
    body += line + "\n";
    const std::string text = line.substr(line.find('\t') + 1);
    if (text.find("nop") == 0 || text.find("endbr64") == 0) continue;
    ++instructions;
    if (text.find('(') != std::string::npos) ++memory;
    EXPECT_EQ(text.find("call"), std::string::npos) << line;
    EXPECT_EQ(text.find("lock"), std::string::npos) << line;
    if (text.find("ret") != std::string::npos) break;
  }
  EXPECT_EQ(memory, 1) << body;
  EXPECT_EQ(instructions, 2) << body;  // mov (%rdi),%eax; ret
}
#endif

}  // namespace
}  // namespace assay
