// A checkpoint's names and shapes held against what the configuration asks for, without decoding anything. The runtime
// refuses at the first thing that does not fit; an audit wants them all.
//
// What it cannot see: a square matrix that is stored transposed, and values.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "model/config.h"
#include "model/layer_names.h"
#include "quant/weight_source.h"

namespace assay {

constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kFinalNorm = "model.norm.weight";
constexpr const char* kHead = "lm_head.weight";

struct WeightMismatch {
  WeightProblem problem;  // "Q-LAYOUT": the shape is the transposed one; else "LOAD"
  bool missing = false;   // no fault of a checkpoint that is a part of a model
};

// The weight of a part. kBadInput: it is missing, cannot be decoded, has another shape, or is integers without scales.
Result<const Weight*> FindPart(const WeightSource& source, const TensorPart& part);

// All that does not fit: tensors that the configuration asks for in the order of computation (a layer of which nothing
// is there counts once), then those that it has no place for, by name; 1000 at most. notes: tensors left out on purpose
// (draft layers, indexer, a stored copy of a tied head), one sentence each.
std::vector<WeightMismatch> HoldAgainstConfig(const WeightSource& source, const ModelConfig& config,
                                              std::vector<std::string>* notes);

}  // namespace assay
