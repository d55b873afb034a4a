// The direction of includes: the table by which cmake/layers.cmake links, checked against every #include of every
// source, since a linker never sees a header.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace assay {
namespace {

namespace fs = std::filesystem;

using Layers = std::map<std::string, std::set<std::string>>;

std::string TextOf(const fs::path& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

// layer -> the layers it may include besides itself: the table of cmake/layers.cmake, and the two folders that are no
// layer of their own there.
const Layers& Allowed() {
  static const Layers kAllowed = [] {
    static const std::regex kRow(R"(\nassay_layer\((\w+)([^)]*)\))");
    const std::string cmake = TextOf(fs::path(ASSAY_SOURCE_DIR) / "cmake" / "layers.cmake");
    Layers layers;
    std::set<std::string> all = {"runtime"};
    for (std::sregex_iterator row(cmake.begin(), cmake.end(), kRow), end; row != end; ++row) {
      std::istringstream names((*row)[2]);
      std::set<std::string>& below = layers[(*row)[1]];
      for (std::string name; names >> name;) below.insert(name);
      all.insert((*row)[1]);
    }
    // compare, report, io: in the offline entry points alone, which are not part of what a host loads.
    layers["runtime"] = {"probe", "trace", "sites", "stats", "tensor", "base", "compare", "report", "io"};
    layers["cli"] = all;
    return layers;
  }();
  return kAllowed;
}

// What goes into libassay, inside the host: libc and threads alone, so none of these.
const std::set<std::string> kInHost = {"base", "tensor", "stats", "sites", "trace", "probe"};
const std::set<std::string> kForbiddenInHost = {"nlohmann", "fmt",     "CLI",   "iostream",
                                                "fstream",  "sstream", "regex", "iomanip"};

struct Include {
  std::string target;  // as written, without quotes or brackets
  bool quoted = false;
  int line = 0;
};

std::vector<Include> IncludesOf(const std::string& text) {
  static const std::regex kInclude(R"(^\s*#\s*include\s*([<"])([^>"]+)[>"])");
  std::vector<Include> includes;
  std::istringstream in(text);
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    std::smatch match;
    if (std::regex_search(line, match, kInclude)) includes.push_back({match[2], match[1] == "\"", number});
  }
  return includes;
}

std::string FirstPart(const std::string& path) { return path.substr(0, path.find('/')); }

// One line for every include of `text` (a source of `layer`) that the tables do not allow.
std::vector<std::string> Violations(const std::string& layer, const std::string& text) {
  std::vector<std::string> found;
  const auto row = Allowed().find(layer);
  if (row == Allowed().end()) return {"folder src/" + layer + " is in no layer"};
  for (const Include& include : IncludesOf(text)) {
    const std::string head = FirstPart(include.target);
    const std::string where = "line " + std::to_string(include.line) + ": " + layer + " includes " + include.target;
    const bool other_layer = include.quoted && head != layer && Allowed().count(head) > 0;
    if (other_layer && row->second.count(head) == 0) found.push_back(where);
    if (kInHost.count(layer) > 0 && kForbiddenInHost.count(head) > 0) found.push_back(where + " (in-host code)");
    if (include.quoted && include.target.find("..") != std::string::npos) found.push_back(where + " (relative path)");
  }
  return found;
}

TEST(Layers, EveryIncludePointsDownwards) {
  const fs::path root = fs::path(ASSAY_SOURCE_DIR) / "src";
  size_t files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    const std::string extension = entry.path().extension();
    if (extension != ".h" && extension != ".cpp" && extension != ".c" && extension != ".inc") continue;
    ++files;
    const fs::path relative = fs::relative(entry.path(), root);
    for (const std::string& violation : Violations(relative.begin()->string(), TextOf(entry.path()))) {
      ADD_FAILURE() << "src/" << relative.string() << " " << violation;
    }
  }
  EXPECT_GE(files, 20u) << "the sources were not found under " << root;
}

TEST(Layers, UpwardIncludeIsFound) {
  EXPECT_EQ(Violations("tensor", "#include \"trace/event.h\"\n").size(), 1u);
  EXPECT_EQ(Violations("compare", "// x\n  #  include \"model/engine.h\"\n").size(), 1u);
  EXPECT_TRUE(Violations("model", "#include \"probe/recorder.h\"\n#include \"model/config.h\"\n").empty());
}

TEST(Layers, HeavyLibraryInsideTheHostIsFound) {
  EXPECT_EQ(Violations("trace", "#include <nlohmann/json.hpp>\n").size(), 1u);
  EXPECT_EQ(Violations("probe", "#include <iostream>\n").size(), 1u);
  EXPECT_TRUE(Violations("io", "#include <nlohmann/json.hpp>\n").empty());
}

TEST(Layers, UnknownFolderAndRelativePathAreFound) {
  EXPECT_EQ(Violations("misc", "").size(), 1u);
  EXPECT_EQ(Violations("cli", "#include \"../base/status.h\"\n").size(), 1u);
}

TEST(Layers, EveryFolderIsInTheTourOfHacking) {
  const std::string tour = TextOf(fs::path(ASSAY_SOURCE_DIR) / "HACKING.md");
  EXPECT_GE(Allowed().size(), 19u);
  for (const auto& row : Allowed()) EXPECT_NE(tour.find("\n| `" + row.first + "` |"), std::string::npos) << row.first;
}

// A cycle in the table would make the order of layers meaningless.
TEST(Layers, TableHasNoCycle) {
  std::set<std::string> done;
  bool progress = true;
  while (progress) {
    progress = false;
    for (const auto& [layer, below] : Allowed()) {
      if (done.count(layer) > 0) continue;
      const bool ready =
          std::all_of(below.begin(), below.end(), [&](const auto& name) { return done.count(name) > 0; });
      if (ready) {
        done.insert(layer);
        progress = true;
      }
    }
  }
  EXPECT_EQ(done.size(), Allowed().size());
}

// Two types of one name in one namespace are one type to the linker, which then lets a vector of the one allocate for
// the other. Types of headers alone: those of sources are in nameless namespaces.
TEST(Layers, NoTwoHeadersHaveATypeOfOneName) {
  static const std::regex kNamespace(R"(^namespace ([\w:]+) \{)");
  static const std::regex kType(R"(^(?:struct|class|enum class|union) (?:alignas\(\w+\) )?(\w+)\b(?!::)[^;]*\{)");
  std::map<std::string, std::string> defined;  // type -> header
  for (const auto& entry : fs::recursive_directory_iterator(fs::path(ASSAY_SOURCE_DIR) / "src")) {
    if (entry.path().extension() != ".h") continue;
    std::istringstream in(TextOf(entry.path()));
    std::string line, scope;
    for (std::smatch match; std::getline(in, line);) {
      if (std::regex_search(line, match, kNamespace)) scope = match[1];
      if (!std::regex_search(line, match, kType)) continue;
      const auto [first, fresh] = defined.try_emplace(scope + "::" + match[1].str(), entry.path().string());
      EXPECT_TRUE(fresh) << first->first << " is in " << first->second << " and in " << entry.path();
    }
  }
  EXPECT_GT(defined.size(), 200u);
}

}  // namespace
}  // namespace assay
