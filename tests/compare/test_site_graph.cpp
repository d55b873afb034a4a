#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "compare/site_graph.h"

namespace assay {
namespace {

// An index of names alone: common sites in causal order.
struct Fixture {
  JointIndex index;
  std::vector<uint8_t> comparable;

  explicit Fixture(std::vector<std::string> common, std::vector<std::string> one_side = {}) {
    std::vector<std::pair<std::string, bool>> all;
    for (auto& name : common) all.emplace_back(name, true);
    for (auto& name : one_side) all.emplace_back(name, false);
    std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
      return ExecutionOrder(ParseSiteName(a.first)) < ExecutionOrder(ParseSiteName(b.first));
    });
    for (const auto& [name, both] : all) {
      JointSite site;
      site.name = name;
      site.parsed = ParseSiteName(name);
      site.recorded[kA] = true;
      site.recorded[kB] = both;
      site.has_rows = true;
      index.sites.push_back(site);
      comparable.push_back(both);
    }
  }

  SiteGraph graph() const { return SiteGraph::Build(index, comparable); }

  uint32_t number(const std::string& name) const {
    for (uint32_t i = 0; i < index.sites.size(); ++i) {
      if (index.sites[i].name == name) return i;
    }
    ADD_FAILURE() << name;
    return 0;
  }

  std::set<std::string> inputs(const SiteGraph& graph, const std::string& name) const {
    std::set<std::string> out;
    for (const GraphEdge& edge : graph.nodes[number(name)].edges) {
      out.insert((edge.context ? "ctx:" : "") + index.sites[edge.site].name);
    }
    return out;
  }
};

using Names = std::set<std::string>;

TEST(SiteGraph, CommonInputsAreDirect) {
  Fixture f({"embed", "layers.0.input_norm", "layers.0.attn.q_proj", "layers.0.attn.o_proj", "layers.0.mlp.down",
             "layers.0.out", "layers.1.input_norm"});
  const SiteGraph g = f.graph();
  EXPECT_EQ(f.inputs(g, "layers.0.input_norm"), Names{"embed"});
  EXPECT_EQ(f.inputs(g, "layers.0.out"), (Names{"embed", "layers.0.attn.o_proj", "layers.0.mlp.down"}));
  EXPECT_TRUE(g.nodes[f.number("layers.0.out")].direct);
  EXPECT_EQ(f.inputs(g, "layers.1.input_norm"), Names{"layers.0.out"});
}

TEST(SiteGraph, RowsReadFromTheCacheStandBetweenTheWriteAndAttention) {
  Fixture f({"layers.0.attn.q", "layers.0.attn.kv_write", "layers.0.attn.k_read", "layers.0.attn.v_read",
             "layers.0.attn.out", "layers.0.attn.o_proj"});
  const SiteGraph g = f.graph();
  EXPECT_EQ(f.inputs(g, "layers.0.attn.k_read"), Names{"layers.0.attn.kv_write"});
  const Names inputs = f.inputs(g, "layers.0.attn.out");
  EXPECT_EQ(inputs.count("ctx:layers.0.attn.k_read") + inputs.count("ctx:layers.0.attn.v_read"), 2u);
  EXPECT_EQ(f.inputs(g, "layers.0.attn.o_proj"), Names{"layers.0.attn.out"});
}

TEST(SiteGraph, OneSidedSitesAreBridgedToCommonAncestors) {
  // Absorbed on one side, materialised on the other.
  Fixture f({"embed", "layers.0.attn.kv_c_normed", "layers.0.attn.k_pe", "layers.0.attn.q_nope", "layers.0.attn.q_pe",
             "layers.0.attn.q", "layers.0.attn.kv_write", "layers.0.attn.out"},
            {"layers.0.attn.k", "layers.0.attn.v", "layers.0.attn.k_nope", "layers.0.attn.q_latent",
             "layers.0.attn.latent_out"});
  const SiteGraph g = f.graph();
  EXPECT_EQ(f.inputs(g, "layers.0.attn.out"),
            (Names{"ctx:layers.0.attn.kv_c_normed", "ctx:layers.0.attn.k_pe", "layers.0.attn.q_nope",
                   "layers.0.attn.q_pe", "layers.0.attn.q", "ctx:layers.0.attn.kv_write"}));
  EXPECT_FALSE(g.nodes[f.number("layers.0.attn.out")].direct);
}

TEST(SiteGraph, AlternativesFollowWhatIsRecorded) {
  Fixture gqa({"layers.0.input_norm", "layers.0.attn.q_proj", "layers.0.attn.k_proj", "layers.0.attn.v_proj",
               "layers.0.attn.q", "layers.0.attn.k", "layers.0.attn.v", "layers.0.attn.kv_write"});
  const SiteGraph g = gqa.graph();
  EXPECT_EQ(gqa.inputs(g, "layers.0.attn.q"), Names{"layers.0.attn.q_proj"});
  EXPECT_EQ(gqa.inputs(g, "layers.0.attn.v"), Names{"layers.0.attn.v_proj"});
  EXPECT_EQ(gqa.inputs(g, "layers.0.attn.kv_write"), (Names{"layers.0.attn.k", "layers.0.attn.v"}));
  Fixture moe({"embed", "layers.0.attn.o_proj", "layers.0.moe.out", "layers.0.out"});
  EXPECT_EQ(moe.inputs(moe.graph(), "layers.0.out"), (Names{"embed", "layers.0.attn.o_proj", "layers.0.moe.out"}));
}

TEST(SiteGraph, SumOverRanksReadsItsPartialResults) {
  Fixture f({"layers.0.attn.out", "layers.0.attn.o_proj.partial", "layers.0.attn.o_proj"});
  const SiteGraph g = f.graph();
  EXPECT_EQ(f.inputs(g, "layers.0.attn.o_proj"), Names{"layers.0.attn.o_proj.partial"});
  EXPECT_EQ(f.inputs(g, "layers.0.attn.o_proj.partial"), Names{"layers.0.attn.out"});
  EXPECT_EQ(g.nodes[f.number("layers.0.attn.o_proj")].op, SiteOp::kReduce);
}

// Weights of the choice are an input of each part, and no addend of their sum.
TEST(SiteGraph, SumOfExpertsOverRanksReadsItsPartialResultsAlone) {
  Fixture f({"layers.0.post_norm", "layers.0.moe.topk_ids", "layers.0.moe.topk_weights", "layers.0.moe.expert_out",
             "layers.0.moe.routed.partial", "layers.0.moe.routed"});
  const SiteGraph g = f.graph();
  EXPECT_EQ(f.inputs(g, "layers.0.moe.routed"), Names{"layers.0.moe.routed.partial"});
  EXPECT_EQ(f.inputs(g, "layers.0.moe.routed.partial").count("layers.0.moe.topk_weights"), 1u);
}

TEST(SiteGraph, SortedRowsReachWhatIsBehindANormThatWasNotRecorded) {
  Fixture f({"layers.0.out", "layers.1.attn.o_proj", "layers.1.moe.topk_ids", "layers.1.moe.gate_up"},
            {"layers.1.post_norm", "layers.1.moe.dispatched"});
  const SiteGraph g = f.graph();
  EXPECT_EQ(f.inputs(g, "layers.1.moe.gate_up"),
            (Names{"layers.0.out", "layers.1.attn.o_proj", "layers.1.moe.topk_ids"}));
  EXPECT_TRUE(g.nodes[f.number("layers.1.moe.gate_up")].inputs_known);
  Fixture choice({"layers.1.moe.topk_ids", "layers.1.moe.dispatched"});
  EXPECT_FALSE(choice.graph().nodes[choice.number("layers.1.moe.dispatched")].inputs_known);
  Fixture counts({"layers.1.moe.topk_ids", "layers.1.moe.expert_counts"});
  EXPECT_TRUE(counts.graph().nodes[counts.number("layers.1.moe.expert_counts")].inputs_known);
}

TEST(SiteGraph, UnrecordedChoiceIsHidden) {
  Fixture f({"embed", "layers.0.attn.o_proj", "layers.0.moe.routed", "layers.0.out", "layers.1.input_norm"});
  EXPECT_TRUE(f.graph().nodes[f.number("layers.0.moe.routed")].hides_choice);
  EXPECT_FALSE(f.graph().nodes[f.number("layers.1.input_norm")].hides_choice);
  Fixture bridged({"layers.0.post_norm", "layers.1.input_norm"}, {"layers.0.out"});
  EXPECT_TRUE(bridged.graph().nodes[bridged.number("layers.1.input_norm")].hides_choice);
}

// layers.2.out has no common ancestor: it is where the comparison begins.
TEST(SiteGraph, MissingLayersReachTheNearestOneBelow) {
  Fixture f({"layers.2.out", "layers.7.input_norm", "final_norm"});
  const SiteGraph g = f.graph();
  EXPECT_EQ(f.inputs(g, "layers.7.input_norm"), Names{"layers.2.out"});
  EXPECT_FALSE(g.nodes[f.number("layers.2.out")].inputs_known);
}

// Names that are not in the table have the order of recording as their only relation, and may read any earlier row.
TEST(SiteGraph, ForeignSitesFollowEachOther) {
  Fixture f({"my.first", "my.second"});
  const SiteGraph g = f.graph();
  EXPECT_EQ(f.inputs(g, "my.second"), Names{"ctx:my.first"});
}

// 21000 bridged sites between two common ones: gains are capped, and the walk must not use the call stack.
TEST(SiteGraph, ThousandsOfOneSidedLayersNeitherRecurseNorExplode) {
  std::vector<std::string> one_side;
  for (int i = 0; i < 3000; ++i) {
    for (const char* stem : {"input_norm", "attn.q", "attn.k", "attn.out", "attn.o_proj", "mlp.down", "out"}) {
      one_side.push_back(FormatSiteName(i, stem));
    }
  }
  Fixture f({"embed", "final_norm"}, one_side);
  const SiteGraph g = f.graph();
  EXPECT_EQ(f.inputs(g, "final_norm").size(), 1u);
  const GraphNode& node = g.nodes[f.number("final_norm")];
  EXPECT_LE(node.edges[0].gain, SiteGraph::kMaxGain);
  EXPECT_TRUE(std::isfinite(node.roundings));
}

}  // namespace
}  // namespace assay
