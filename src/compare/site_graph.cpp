#include "compare/site_graph.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <unordered_map>

#include "compare/bounds.h"
#include "sites/beyond_table.h"

namespace assay {
namespace {

// Bridged layers are reached over many ways; more than this many roundings (64 u in quadrature) are not told apart.
constexpr double kMaxRoundings = 4096;

constexpr std::string_view kCacheReads[] = {"attn.k_read", "attn.v_read", "attn.kv_read"};
constexpr std::string_view kCachePools[] = {"attn.k_cache", "attn.v_cache", "attn.kv_cache"};

// What stands behind a name: itself when it is common, else what its definition reads.
struct Ancestors {
  std::vector<GraphEdge> edges;
  double roundings = 0;  // of operations bridged
  bool contracts = false;
  bool hides_choice = false;
};

// Nodes are built in causal order, so everything behind a node is known when it is built.
class GraphBuilder {
 public:
  GraphBuilder(const JointIndex& index, const std::vector<uint8_t>& comparable)
      : index_(index), comparable_(comparable) {}

  SiteGraph Run() {
    const auto n = static_cast<uint32_t>(index_.sites.size());
    graph_.nodes.resize(n);
    for (uint32_t i = 0; i < n; ++i) {
      const JointSite& site = index_.sites[i];
      numbers_.emplace(site.name, i);
      if (site.parsed.layer >= 0) AddToLayer(site);
    }
    for (uint32_t i = 0; i < n; ++i) BuildNode(i);
    for (uint32_t i = 0; i < n; ++i) {
      graph_.nodes[i].last_use = std::max(graph_.nodes[i].last_use, i);
      for (const GraphEdge& edge : graph_.nodes[i].edges) UsedBy(edge.site, i);
      if (graph_.nodes[i].margin_site >= 0) UsedBy(static_cast<uint32_t>(graph_.nodes[i].margin_site), i);
    }
    return std::move(graph_);
  }

 private:
  struct Layer {
    bool materialised = false, absorbed = false;  // paths of which sites are recorded
    std::vector<int32_t> chunks;                  // chunk numbers recorded
    int32_t below = -1;                           // nearest recorded layer below
  };

  // The judge frees a site's cells behind its last reader.
  void UsedBy(uint32_t site, uint32_t reader) {
    graph_.nodes[site].last_use = std::max(graph_.nodes[site].last_use, reader);
  }

  void AddToLayer(const JointSite& site) {
    const int32_t layer = site.parsed.layer;
    auto [it, is_new] = layers_.try_emplace(layer);
    if (is_new) {
      it->second.below = last_layer_;
      last_layer_ = layer;  // sites are in causal order, so layers come ascending
    }
    if (site.parsed.def == nullptr) return;
    it->second.materialised |= site.parsed.def->paths == "materialised";
    it->second.absorbed |= site.parsed.def->paths == "absorbed";
    if (site.parsed.chunk >= 0) {
      std::vector<int32_t>& chunks = it->second.chunks;
      if (std::find(chunks.begin(), chunks.end(), site.parsed.chunk) == chunks.end()) {
        chunks.push_back(site.parsed.chunk);
      }
    }
  }

  // A site that is not compared is only bridged; its readers then see what it reads.
  void BuildNode(uint32_t i) {
    const JointSite& site = index_.sites[i];
    GraphNode& node = graph_.nodes[i];
    node.comparable = comparable_[i] != 0;
    if (!node.comparable) {
      Bridge(site.name);  // in causal order, so that no later look-up recurses through many layers
      return;
    }
    if (site.parsed.def == nullptr) {
      if (!BuildCacheRead(i) && !BuildByExpert(i)) BuildForeign(i);
      return;
    }
    node.op = site.parsed.def->op;
    Ancestors inputs;
    // A sum over ranks reads its partial results; those read what the table says.
    const int64_t partial = site.parsed.partial ? -1 : Common(site.name + ".partial");
    if (partial >= 0) {
      node.op = SiteOp::kReduce;
      inputs.edges.push_back({static_cast<uint32_t>(partial), false, 1});
      node.direct = true;
    } else {
      node.direct = true;
      inputs = InputsOf(site.parsed.layer, *site.parsed.def, &node.direct);
    }
    const OpModel model = ModelOf(node.op);
    node.roundings = model.roundings + inputs.roundings;
    node.contracts = model.contracts || inputs.contracts;
    node.hides_choice = inputs.hides_choice;
    for (const GraphEdge& edge : inputs.edges) {
      node.edges.push_back({edge.site, edge.context, std::min(edge.gain * model.gain, SiteGraph::kMaxGain)});
    }
    const bool attends =
        std::any_of(node.edges.begin(), node.edges.end(), [](const GraphEdge& edge) { return edge.context; });
    for (const std::string_view read : kCacheReads) {
      const int64_t common = attends ? Common(FormatSiteName(site.parsed.layer, read)) : -1;
      if (common >= 0) node.edges.push_back({static_cast<uint32_t>(common), true, model.gain});
    }
    const BeyondSite* beyond = partial < 0 ? FindBeyond(site.parsed.stem) : nullptr;  // parts add up to it, alone
    if (beyond != nullptr) AddBeyond(site.parsed.layer, *beyond, &node);
    node.inputs_known = KnowsInputs(node);
    node.margin_site = Common(site.name + ".margin");
  }

  // Inputs beyond the site table, those that are common.
  void AddBeyond(int32_t layer, const BeyondSite& beyond, GraphNode* node) {
    const double gain = ModelOf(node->op).gain;
    const auto alternatives = ParseSiteInputs(beyond.inputs);
    for (const SiteInput& input : alternatives.front()) {
      const int64_t common = Common(FormatSiteName(layer, input.name));
      const bool known = std::any_of(node->edges.begin(), node->edges.end(),
                                     [&](const GraphEdge& edge) { return edge.site == common; });
      if (common >= 0 && !known) node->edges.push_back({static_cast<uint32_t>(common), false, gain});
    }
  }

  // Adds the input itself, or what stands behind it. False: it was bridged.
  bool AddInput(const std::string& name, bool context, Ancestors* out) {
    const int64_t common = Common(name);
    if (common >= 0) {
      Add({static_cast<uint32_t>(common), context, 1}, out);
      return true;
    }
    const Ancestors& behind = Bridge(name);
    for (GraphEdge edge : behind.edges) {
      edge.context |= context;
      Add(edge, out);
    }
    out->roundings = std::min(out->roundings + behind.roundings, kMaxRoundings);
    out->contracts |= behind.contracts;
    out->hides_choice |= behind.hides_choice;
    return false;
  }

  // A choice says which rows an operation took, nothing of what is in them.
  bool KnowsInputs(const GraphNode& node) const {
    return std::any_of(node.edges.begin(), node.edges.end(), [&](const GraphEdge& edge) {
      const SiteOp op = graph_.nodes[edge.site].op;
      return op != SiteOp::kSelect && op != SiteOp::kArgmax;
    });
  }

  // Rows sorted by expert, and what is made of them. False: it is no such site.
  bool BuildByExpert(uint32_t i) {
    const SiteName& name = index_.sites[i].parsed;
    const BeyondSite* beyond = FindBeyond(name.stem);
    if (beyond == nullptr || !beyond->by_expert) return false;
    GraphNode& node = graph_.nodes[i];
    const OpModel model = ModelOf(beyond->op);
    node.op = beyond->op;
    node.by_step = !index_.sites[i].has_rows;
    const Ancestors inputs = InputsByExpert(name.layer, *beyond);
    node.roundings = model.roundings + inputs.roundings;
    node.contracts = model.contracts || inputs.contracts;
    node.hides_choice = inputs.hides_choice;
    for (const GraphEdge& edge : inputs.edges) {
      node.edges.push_back({edge.site, edge.context, std::min(edge.gain * model.gain, SiteGraph::kMaxGain)});
    }
    const bool choice_alone = beyond->inputs.find(',') == std::string_view::npos;  // counts of it
    node.inputs_known = choice_alone ? !node.edges.empty() : KnowsInputs(node);
    return true;
  }

  // A choice that is not common is left out: without it nothing says whether both sides sent the same rows.
  Ancestors InputsByExpert(int32_t layer, const BeyondSite& beyond) {
    Ancestors out;
    const auto alternatives = ParseSiteInputs(beyond.inputs);
    for (const SiteInput& input : alternatives.front()) {
      const std::string name = FormatSiteName(layer, input.name);
      const SiteDef* def = ParseSiteName(name).def;
      if (Common(name) < 0 && def != nullptr && def->op == SiteOp::kSelect) continue;
      AddInput(name, false, &out);
    }
    return out;
  }

  // A row read from the cache is the row written there, or a part of it. False: it is no such site, or what was written
  // is not known.
  bool BuildCacheRead(uint32_t i) {
    const SiteName& name = index_.sites[i].parsed;
    const int64_t written = IsCacheRead(name.stem) ? Common(FormatSiteName(name.layer, "attn.kv_write")) : -1;
    if (written < 0) return false;
    GraphNode& node = graph_.nodes[i];
    const OpModel model = ModelOf(SiteOp::kCopy);
    node.op = SiteOp::kCopy;
    node.roundings = model.roundings;
    node.dequantised = true;
    node.edges.push_back({static_cast<uint32_t>(written), false, model.gain});
    node.inputs_known = true;
    return true;
  }

  // Sites without a definition: a parameter has no inputs, a value with rows is taken to come from
  // what is said of it beyond the site table, else from the foreign site recorded before it, over any row of the
  // request.
  void BuildForeign(uint32_t i) {
    GraphNode& node = graph_.nodes[i];
    const OpModel model{8, true, 16};  // unknown: as wide as the widest operation
    const JointSite& site = index_.sites[i];
    if (!site.has_rows) {
      node.op = SiteOp::kSource;
      node.roundings = 1;
      if (!site.per_step || site.parsed.layer < 0) return;
      // Made of the step's rows in an unknown way (scales of an activation): from what enters the layer, at the least.
      const int64_t enters = Common(Expand(site.parsed.layer, "prev.out").front());
      if (enters < 0) return;
      node.by_step = true;
      node.inputs_known = true;
      node.edges.push_back({static_cast<uint32_t>(enters), false, model.gain});
      return;
    }
    node.op = SiteOp::kLinear;
    node.roundings = model.roundings;
    node.contracts = true;
    if (const BeyondSite* beyond = FindBeyond(site.parsed.stem)) AddBeyond(site.parsed.layer, *beyond, &node);
    if (node.edges.empty() && previous_foreign_ >= 0) node.edges.push_back({static_cast<uint32_t>(previous_foreign_)});
    for (GraphEdge& edge : node.edges) {
      edge.context = true;
      edge.gain = model.gain;
    }
    node.inputs_known = !node.edges.empty();
    previous_foreign_ = i;
  }

  // Number of the site when it is compared, else -1.
  int64_t Common(const std::string& name) const {
    const auto it = numbers_.find(name);
    return it != numbers_.end() && comparable_[it->second] ? int64_t{it->second} : -1;
  }
  // On either side, compared or not.
  bool Recorded(const std::string& name) const { return numbers_.count(name) > 0; }

  // Full names behind an input's name.
  // "prev.out" is the residual stream of the nearest recorded layer below; "J" stands for every chunk that was
  // recorded.
  std::vector<std::string> Expand(int32_t layer, std::string_view input) const {
    if (input == "prev.out") {
      int32_t below = last_layer_;
      if (layer >= 0) {
        const auto it = layers_.find(layer);
        below = it == layers_.end() ? -1 : it->second.below;
      }
      return {below < 0 ? std::string("embed") : FormatSiteName(below, "out")};
    }
    const size_t j = input.find(".J.");
    if (j == std::string_view::npos) return {FormatSiteName(layer, input)};
    std::vector<std::string> names;
    if (const auto it = layers_.find(layer); it != layers_.end()) {
      for (int32_t chunk : it->second.chunks) {
        names.push_back(FormatSiteName(
            layer, std::string(input.substr(0, j + 1)) + std::to_string(chunk) + std::string(input.substr(j + 2))));
      }
    }
    return names;
  }

  // Alternatives of the table: the one most of whose names are recorded, the first among equals.
  const std::vector<SiteInput>& Choose(int32_t layer, const std::vector<std::vector<SiteInput>>& alternatives) const {
    size_t best = 0, best_count = 0;
    for (size_t i = 0; i < alternatives.size(); ++i) {
      size_t count = 0;
      for (const SiteInput& input : alternatives[i]) {
        for (const std::string& name : Expand(layer, input.name)) count += Recorded(name);
      }
      if (count > best_count) {
        best = i;
        best_count = count;
      }
    }
    return alternatives[best];
  }

  // *direct becomes false when an input is bridged.
  Ancestors InputsOf(int32_t layer, const SiteDef& def, bool* direct) {
    bool materialised = true, absorbed = false;
    if (const auto it = layers_.find(layer); it != layers_.end() && it->second.absorbed) {
      absorbed = true;
      materialised = it->second.materialised;
    }
    Ancestors out;
    // Layers that recorded sites of both paths (prefill materialised, decode absorbed) read both lists.
    std::string_view lists[2] = {materialised ? def.inputs_materialised : "", absorbed ? def.inputs_absorbed : ""};
    if (lists[0] == lists[1]) lists[1] = "";
    for (std::string_view list : lists) {
      const auto alternatives = ParseSiteInputs(list);
      if (alternatives.empty()) continue;
      for (const SiteInput& input : Choose(layer, alternatives)) {
        for (const std::string& name : Expand(layer, input.name)) {
          if (!AddInput(name, input.context, &out)) *direct = false;
        }
      }
    }
    return out;
  }

  // One edge a site: of two ways to it the one with the larger gain counts.
  static void Add(const GraphEdge& edge, Ancestors* out) {
    for (GraphEdge& other : out->edges) {
      if (other.site != edge.site) continue;
      other.context |= edge.context;
      other.gain = std::max(other.gain, edge.gain);
      return;
    }
    out->edges.push_back(edge);
  }

  // What a name that is not common is computed from. Recursion ends at embed; it is at most one layer deep beyond
  // what is remembered, because sites are built in causal order.
  const Ancestors& Bridge(const std::string& name) {
    if (const auto it = bridged_.find(name); it != bridged_.end()) return it->second;
    Ancestors out;
    const SiteName parsed = ParseSiteName(name);
    const BeyondSite* beyond = parsed.def == nullptr ? FindBeyond(parsed.stem) : nullptr;
    const bool by_expert = beyond != nullptr && beyond->by_expert;
    if (parsed.def != nullptr || by_expert) {
      bool direct = true;
      out = by_expert ? InputsByExpert(parsed.layer, *beyond) : InputsOf(parsed.layer, *parsed.def, &direct);
      const SiteOp op = by_expert ? beyond->op : parsed.def->op;
      const OpModel model = ModelOf(op);
      // Of a layer whose FFN was not recorded it is not known whether it has experts.
      out.hides_choice |= by_expert || op == SiteOp::kSelect || op == SiteOp::kCombine || parsed.stem == "mlp.down";
      out.roundings += model.roundings;
      out.contracts |= model.contracts;
      for (GraphEdge& edge : out.edges) edge.gain = std::min(edge.gain * model.gain, SiteGraph::kMaxGain);
    }
    return bridged_.emplace(name, std::move(out)).first->second;
  }

  const JointIndex& index_;
  const std::vector<uint8_t>& comparable_;
  SiteGraph graph_;
  std::unordered_map<std::string, uint32_t> numbers_;
  std::map<int32_t, Layer> layers_;
  std::map<std::string, Ancestors> bridged_;
  int32_t last_layer_ = -1;
  int64_t previous_foreign_ = -1;
};

}  // namespace

bool IsCachePool(std::string_view stem) {
  return std::find(std::begin(kCachePools), std::end(kCachePools), stem) != std::end(kCachePools);
}

bool IsCacheRead(std::string_view stem) {
  return std::find(std::begin(kCacheReads), std::end(kCacheReads), stem) != std::end(kCacheReads);
}

SiteGraph SiteGraph::Build(const JointIndex& index, const std::vector<uint8_t>& comparable) {
  return GraphBuilder(index, comparable).Run();
}

}  // namespace assay
