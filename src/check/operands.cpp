#include "check/operands.h"

#include <algorithm>

#include "sites/beyond_table.h"

namespace assay::check {
namespace {

void Split(std::string_view list, std::vector<std::string>* out, const std::string& prefix) {
  for (size_t at = 0; at < list.size();) {
    const size_t comma = std::min(list.find(',', at), list.size());
    if (comma > at) out->push_back(prefix + std::string(list.substr(at, comma - at)));
    at = comma + 1;
  }
}

// Names of the table's inputs, made full: `prev.out` by the layer, `.J.` by the chunk. All alternatives are listed; the
// caller takes those that were recorded.
void FromTable(const EventInfo& result, std::string_view inputs, std::vector<std::string>* out) {
  for (const auto& alternative : ParseSiteInputs(inputs)) {
    for (const SiteInput& input : alternative) {
      std::string name(input.name);
      if (name == "prev.out") {
        if (result.site.layer > 0) out->push_back("layers." + std::to_string(result.site.layer - 1) + ".out");
        if (result.site.layer == 0) out->push_back("embed");
        continue;
      }
      if (const size_t at = name.find(".J."); at != std::string::npos && result.site.chunk >= 0) {
        name.replace(at + 1, 1, std::to_string(result.site.chunk));
      }
      const bool per_layer = std::any_of(AllSites().begin(), AllSites().end(),
                                         [&](const SiteDef& d) { return d.name == name && d.per_layer; });
      out->push_back((per_layer ? result.prefix : "") + name);
    }
  }
}

}  // namespace

std::vector<std::string> OperandNames(const EventInfo& result) {
  std::vector<std::string> out;
  // What the recorder said of this very event goes before any rule.
  if (const auto inputs = Capture::OwnText(result, "inputs")) {
    Split(*inputs, &out, "");
    return out;
  }
  if (const auto of = Capture::OwnText(result, "scale_of")) out.push_back(*of);
  if (result.site.def != nullptr) {
    FromTable(result, result.site.def->inputs_materialised, &out);
    FromTable(result, result.site.def->inputs_absorbed, &out);
  }
  if (const BeyondSite* beyond = FindBeyond(result.site.stem)) Split(beyond->inputs, &out, result.prefix);
  if (result.name.ends_with(".q")) out.push_back(result.name.substr(0, result.name.size() - 2));
  // A reduced result comes from its partial ones, a GEMM may read the codes and scales of its input.
  const size_t n = out.size();
  if (!result.site.partial) out.push_back(result.name + ".partial");
  for (size_t i = 0; i < n; ++i) {
    out.push_back(out[i] + ".q");
    out.push_back(out[i] + ".q_scale");
  }
  std::vector<std::string> unique;
  for (std::string& name : out) {
    if (name != result.name && std::find(unique.begin(), unique.end(), name) == unique.end())
      unique.push_back(std::move(name));
  }
  return unique;
}

std::vector<EventId> RecordedOperands(const Capture& capture, const EventInfo& result) {
  std::vector<EventId> out;
  for (const std::string& name : OperandNames(result)) {
    if (const auto id = capture.Operand(result, name)) out.push_back(*id);
  }
  return out;
}

}  // namespace assay::check
