// Runs of the shipped model for the engine's tests: options in, tokens, logits and (when asked) a trace out.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/safetensors.h"
#include "model/config.h"
#include "model/engine.h"
#include "probe/recorder.h"
#include "trace/reader.h"

namespace assay::testing {

inline std::string ModelDir() { return std::string(ASSAY_SOURCE_DIR) + "/models/kjv-mla-10m"; }

// Opened once a process and shared.
inline std::shared_ptr<const Checkpoint> Model() {
  static const std::shared_ptr<const Checkpoint> checkpoint = [] {
    auto opened = Checkpoint::Open(ModelDir());
    EXPECT_TRUE(opened.ok()) << opened.status().message();
    return std::move(opened).value();
  }();
  return checkpoint;
}

// overrides: "key=value", as on the command line.
inline ModelConfig Config(const std::vector<std::string>& overrides = {}) {
  auto config = LoadModelConfig(ModelDir(), overrides);
  EXPECT_TRUE(config.ok()) << config.status().message();
  return *config;
}

// A folder that is removed again.
class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "assay-engine-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// "In the beginning God created the heaven and the earth." and "And the LORD spake unto Moses, saying," as ids.
inline std::vector<int64_t> PromptA() { return {1145, 261, 1798, 1241, 389, 282, 556, 285, 261, 736}; }
inline std::vector<int64_t> PromptB() { return {285, 261, 305, 736, 1241, 556, 389}; }

struct RunResult {
  std::vector<Generation> generations;
  std::map<std::pair<int64_t, int64_t>, std::vector<double>> logits;  // (prompt, position)
  std::unique_ptr<Trace> trace;
};

// folder empty: no trace. level: of the trace.
inline Result<RunResult> RunModel(const EngineOptions& options, const std::vector<PromptInput>& prompts,
                                  const std::string& folder = "", Level level = Level::kStats,
                                  const ModelConfig& config = Config()) {
  RunResult out;
  ASSAY_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine, Engine::Create(Model(), config, options));
  std::unique_ptr<Recorder> recorder;
  if (!folder.empty()) {
    Settings settings;
    settings.profile = "all";
    settings.dir = folder;
    settings.level = level;
    ProcessInfo process;
    process.meta = engine->Describe();
    ASSAY_ASSIGN_OR_RETURN(recorder, Recorder::Open(settings, process));
  }
  const LogitsSink sink = [&](int64_t prompt, int64_t position, std::span<const double> row) {
    out.logits[{prompt, position}].assign(row.begin(), row.end());
  };
  ASSAY_ASSIGN_OR_RETURN(out.generations, engine->Generate(prompts, recorder.get(), sink));
  if (recorder) {
    ASSAY_RETURN_IF_ERROR(recorder->Close());
    ASSAY_ASSIGN_OR_RETURN(out.trace, Trace::Open(folder));
  }
  return out;
}

}  // namespace assay::testing
