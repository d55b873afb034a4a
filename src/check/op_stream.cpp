#include "check/op_stream.h"

#include <algorithm>

namespace assay::op {

std::string StreamInto(int32_t layer) { return layer > 0 ? "layers." + std::to_string(layer - 1) + ".out" : "embed"; }

std::vector<Input> StreamBehind(const Subject& norm, std::string* missing) {
  const EventInfo& info = norm.info();
  std::vector<Input> inputs;
  const auto add = [&](const std::string& name) {
    inputs.push_back({name, norm.Operand(name)});
    if (inputs.back().tensor == nullptr && missing->empty()) *missing = name;
  };
  if (info.prefix.empty()) {  // final_norm
    // The last layer that was recorded may not be the model's last: then the stream before the final norm is missing.
    int32_t last = -1;
    for (const std::string& name : norm.capture().NamesOfStem("out")) {
      if (norm.capture().Operand(info, name)) last = std::max(last, ParseSiteName(name).layer);
    }
    const int64_t layers = norm.capture().Integer(info, "model.n_layers").value_or(last + 1);
    add(layers == last + 1 ? StreamInto(last + 1) : StreamInto(static_cast<int32_t>(layers)));
    return inputs;
  }
  add(StreamInto(info.site.layer));
  if (info.name.ends_with("post_norm")) {
    add(info.prefix + "attn.o_proj");
    if (norm.Flag("sandwich_norm", false) && missing->empty()) *missing = inputs.back().name + " behind its own norm";
  }
  return inputs;
}

}  // namespace assay::op
