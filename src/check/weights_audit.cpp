#include "check/weights_audit.h"

#include <fnmatch.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdlib>

#include "base/parallel_for.h"

namespace assay {
namespace {

// -1: outside the layers.
int32_t LayerOf(const std::string& canonical) {
  constexpr std::string_view kPrefix = "layers.";
  return canonical.rfind(kPrefix, 0) == 0 ? std::atoi(canonical.c_str() + kPrefix.size()) : -1;
}

// The embedding stands before the layers, norm and head behind them.
int64_t Place(const FirstBad& bad) {
  if (bad.layer >= 0) return bad.layer;
  return bad.name.find("embed") != std::string::npos ? -1 : INT_MAX;
}

}  // namespace

FirstBad WeightBad(const std::string& canonical, std::string_view cls, std::string method, double confidence,
                   std::vector<std::string> evidence) {
  FirstBad bad;
  bad.name = canonical;
  bad.layer = LayerOf(canonical);
  bad.cls = cls;
  bad.method = std::move(method);
  bad.confidence = confidence;
  bad.evidence = std::move(evidence);
  return bad;
}

const Json* ConfigKey(const WeightSource& source, std::string_view key) {
  if (const Json* value = FindKey(source.config(), key)) return value;
  // Multimodal checkpoints nest the language model's configuration.
  for (const char* inner : {"text_config", "language_config", "llm_config"}) {
    const Json* nested = FindKey(source.config(), inner);
    if (nested == nullptr) continue;
    if (const Json* value = FindKey(*nested, key)) return value;
  }
  return nullptr;
}

int64_t ConfigInt(const WeightSource& source, std::string_view key, int64_t absent) {
  const Json* value = ConfigKey(source, key);
  return value != nullptr && value->is_number_integer() ? value->get<int64_t>() : absent;
}

Result<WeightsResult> AuditWeights(const WeightSource& source, const Trace* trace, const WeightsOptions& options) {
  WeightsResult result;
  std::vector<const Weight*> chosen;
  for (const WeightPtr& weight : source.weights()) {
    if (options.only.empty() || ::fnmatch(options.only.c_str(), weight->name().c_str(), 0) == 0) {
      chosen.push_back(weight.get());
    }
  }
  const auto start = std::chrono::steady_clock::now();
  result.weights.resize(chosen.size());
  // One weight a task; each writes its own entry alone. Findings are collected behind it, in one thread, so that their
  // order does not depend on the number of threads.
  ParallelFor(static_cast<int64_t>(chosen.size()), options.threads, [&](int64_t i) {
    result.weights[static_cast<size_t>(i)] = MeasureWeight(*chosen[static_cast<size_t>(i)]);
  });
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (const WeightAudit& audit : result.weights) {
    result.stored_bytes += audit.weight->stored_bytes();
    result.elements += audit.stats.count;
  }

  std::vector<WeightFinding> found;
  uint64_t unread = 0;
  std::string first_unread;
  for (const WeightProblem& problem : source.problems()) {
    if (problem.cls.empty()) {
      if (++unread == 1) first_unread = problem.what;
      continue;
    }
    found.push_back(
        {-1, WeightBad(CanonicalWeightName(problem.name), problem.cls, "weights: format", 0.95, {problem.what})});
  }
  if (unread > 0) {
    result.notes.push_back(
        (unread == 1 ? "a tensor was not judged: " : std::to_string(unread) + " tensors were not judged, the first: ") +
        first_unread);
  }
  CheckScales(source, result.weights, &found);
  for (const WeightProblem& wrong : options.mismatches) {
    found.push_back(
        {-1, WeightBad(CanonicalWeightName(wrong.name), wrong.cls, "weights: against config", 0.95, {wrong.what})});
  }
  CheckStructure(source, result.weights, options, &found, &result.notes);
  if (trace != nullptr) {
    result.with_trace = true;
    CheckMemory(source, *trace, options, &result, &found);
  }
  // Findings of one place stay in the order of the rules that made them, but what only the checkpoint says (-1) comes
  // first.
  std::stable_sort(found.begin(), found.end(), [](const WeightFinding& a, const WeightFinding& b) {
    return std::pair(Place(a.bad), a.sequence) < std::pair(Place(b.bad), b.sequence);
  });
  for (WeightFinding& f : found) result.findings.push_back(std::move(f.bad));
  return result;
}

}  // namespace assay
