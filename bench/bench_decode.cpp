// Decode speed of the native runtime, float32, greedy, without a recorder. Started by bench/decode.py, which runs
// transformers beside it; alone it prints tokens per second, one line a run.
//   bench_decode --model DIR --prompt-tokens 1,2,3 --new-tokens N --runs R --threads T --path materialised|absorbed
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "model/config.h"
#include "model/engine.h"

namespace {

using namespace assay;

std::vector<int64_t> ParseIds(const std::string& text) {
  std::vector<int64_t> ids;
  std::istringstream in(text);
  for (std::string id; std::getline(in, id, ',');) ids.push_back(std::atoll(id.c_str()));
  return ids;
}

Status Run(const std::map<std::string, std::string>& arguments) {
  const std::string& dir = arguments.at("--model");
  EngineOptions options;
  options.path = arguments.at("--path") == "absorbed" ? AttentionPath::kAbsorbed : AttentionPath::kMaterialised;
  options.threads = std::atoi(arguments.at("--threads").c_str());
  options.max_tokens = std::atoll(arguments.at("--new-tokens").c_str());
  options.ignore_eos = true;
  ASSAY_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(dir));
  ASSAY_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(dir + "/config.json"));
  ASSAY_ASSIGN_OR_RETURN(const auto engine, Engine::Create(checkpoint, config, options));
  const std::vector<PromptInput> prompts = {{ParseIds(arguments.at("--prompt-tokens")), {}}};
  for (int run = std::atoi(arguments.at("--runs").c_str()); run > 0; --run) {
    const RunStats before = engine->stats();
    ASSAY_ASSIGN_OR_RETURN(const std::vector<Generation> generated, engine->Generate(prompts, nullptr));
    const RunStats after = engine->stats();
    // Whether stats() counts from the engine's birth or from the last call, the difference or the value is one run.
    const bool grows = after.decode_tokens > before.decode_tokens;
    const double tokens = static_cast<double>(after.decode_tokens - (grows ? before.decode_tokens : 0));
    const double seconds = after.decode_seconds - (grows ? before.decode_seconds : 0);
    std::printf("%.6g\n", tokens / seconds);
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, std::string> arguments = {{"--model", ASSAY_SOURCE_DIR "/models/kjv-mla-10m"},
                                                  {"--prompt-tokens", "0,100,200,300,400,500,600,700"},
                                                  {"--new-tokens", "128"},
                                                  {"--runs", "9"},
                                                  {"--threads", "1"},
                                                  {"--path", "absorbed"}};
  for (int i = 1; i + 1 < argc; i += 2) {
    if (arguments.count(argv[i]) == 0) {
      std::fprintf(stderr, "bench_decode: unknown option %s\n", argv[i]);
      return 2;
    }
    arguments[argv[i]] = argv[i + 1];
  }
  const Status status = Run(arguments);
  if (!status.ok()) std::fprintf(stderr, "bench_decode: %s\n", status.message().c_str());
  return static_cast<int>(status.code());
}
