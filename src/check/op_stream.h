// The residual stream at a place of a layer.
#pragma once

#include <string>
#include <vector>

#include "check/op_explain.h"

namespace assay::op {

// Name of the stream that enters layer `layer`: the out of the layer before, embed for the first.
std::string StreamInto(int32_t layer);
// What a norm on the stream starts from: input_norm: the stream that enters; post_norm: that and attn.o_proj;
// final_norm: the out of the last layer. `missing` names what was not recorded.
std::vector<Input> StreamBehind(const Subject& norm, std::string* missing);

}  // namespace assay::op
