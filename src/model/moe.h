// Routing of a mixture-of-experts layer: which experts a row goes to, with which weights, and by what margin.
//
// Scores and choices are computed in double from the router's logits whatever the run's type, so that the choice
// depends on the logits alone; ties go to the lower expert number. The arithmetic of each family is in model/config.h.
#pragma once

#include <cstdint>
#include <vector>

#include "model/config.h"

namespace assay {

struct Routing {
  std::vector<int64_t> ids;     // [rows, k], by descending selection score
  std::vector<double> weights;  // [rows, k], scaled
  std::vector<float> margins;   // [rows]: smallest gap between consecutive selection scores among the first k + 1, the
                                // choice of groups included; infinity when there is but one expert
};

// What planted faults change in the arithmetic; all false is right.
struct RoutingFaults {
  bool skip_renormalise = false, bias_in_weights = false, skip_scaling = false, bf16_bias = false;
};

// logits [rows, E]; bias [E] or null.
template <class T>
void Route(const ModelConfig& config, const T* logits, const T* bias, int64_t rows, const RoutingFaults& faults,
           Routing* out);

extern template void Route<float>(const ModelConfig&, const float*, const float*, int64_t, const RoutingFaults&,
                                  Routing*);
extern template void Route<double>(const ModelConfig&, const double*, const double*, int64_t, const RoutingFaults&,
                                   Routing*);

}  // namespace assay
