// Generated variants of a checkpoint, made in memory as its layers are loaded (model/faults.h, Variant): what some
// planted faults need and the shipped model does not have. The clean twin of such a fault gets the same variant.
#pragma once

#include "model/config.h"
#include "model/faults.h"
#include "model/weights.h"

namespace assay {

// Turns the weights of one layer into the variant that plan.def needs; with a quantised variant and a fault planted in
// that layer, dequantises as the mistaken code would.
template <class T>
void ApplyVariant(const ModelConfig& config, const FaultPlan& plan, int64_t layer, LayerWeights<T>* weights);

extern template void ApplyVariant<float>(const ModelConfig&, const FaultPlan&, int64_t, LayerWeights<float>*);
extern template void ApplyVariant<double>(const ModelConfig&, const FaultPlan&, int64_t, LayerWeights<double>*);

}  // namespace assay
