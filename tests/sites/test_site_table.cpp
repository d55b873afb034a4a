#include <gtest/gtest.h>

#include <set>

#include "sites/site_table.h"

namespace assay {
namespace {

TEST(SiteTable, NamesAreUnique) {
  std::set<std::string_view> names;
  for (const SiteDef& def : AllSites()) EXPECT_TRUE(names.insert(def.name).second) << def.name;
}

TEST(SiteTable, EveryInputIsASiteThatComesEarlier) {
  for (const SiteDef& def : AllSites()) {
    for (std::string_view list : {def.inputs_materialised, def.inputs_absorbed}) {
      for (const auto& alternative : ParseSiteInputs(list)) {
        EXPECT_FALSE(alternative.empty()) << def.name;
        for (const SiteInput& input : alternative) {
          if (input.name == "prev.out") continue;
          const SiteDef* found = nullptr;
          for (const SiteDef& other : AllSites()) {
            if (other.name == input.name) found = &other;
          }
          ASSERT_NE(found, nullptr) << def.name << " reads " << input.name;
          EXPECT_LT(found, &def) << def.name << " reads " << input.name;
        }
      }
    }
  }
}

TEST(SiteTable, EverySiteButTheEmbeddingHasInputs) {
  for (const SiteDef& def : AllSites()) {
    EXPECT_EQ(ParseSiteInputs(def.inputs_materialised).empty(), def.op == SiteOp::kEmbed) << def.name;
    EXPECT_EQ(ParseSiteInputs(def.inputs_absorbed).empty(), def.op == SiteOp::kEmbed) << def.name;
  }
}

TEST(SiteName, LayerChunkAndPartialAreTakenApart) {
  SiteName a = ParseSiteName("layers.12.attn.o_proj.partial");
  EXPECT_EQ(a.layer, 12);
  EXPECT_TRUE(a.partial);
  EXPECT_EQ(a.stem, "attn.o_proj");
  ASSERT_NE(a.def, nullptr);
  EXPECT_EQ(a.def->name, "attn.o_proj");

  SiteName b = ParseSiteName("layers.0.attn.chunk.3.lse");
  EXPECT_EQ(b.chunk, 3);
  EXPECT_EQ(b.stem, "attn.chunk.3.lse");
  ASSERT_NE(b.def, nullptr);
  EXPECT_EQ(b.def->name, "attn.chunk.J.lse");

  SiteName c = ParseSiteName("final_norm");
  EXPECT_EQ(c.layer, -1);
  ASSERT_NE(c.def, nullptr);
}

TEST(SiteName, WhatIsNotCanonicalKeepsItsText) {
  EXPECT_EQ(ParseSiteName("layers.1.attn.kv_b_proj.weight").def, nullptr);
  EXPECT_EQ(ParseSiteName("layers.1.attn.kv_b_proj.weight").layer, 1);
  EXPECT_EQ(ParseSiteName("layers.1.attn.kv_b_proj.weight").stem, "attn.kv_b_proj.weight");
  EXPECT_EQ(ParseSiteName("model.layers.0.self_attn").layer, -1);
  EXPECT_EQ(ParseSiteName("layers.99999999999.out").layer, -1);
  EXPECT_EQ(ParseSiteName("layers.").stem, "layers.");
  EXPECT_EQ(ParseSiteName("layers.3.").layer, -1);
  EXPECT_EQ(ParseSiteName("").def, nullptr);
  EXPECT_EQ(ParseSiteName(".partial").stem, ".partial");
  EXPECT_EQ(ParseSiteName("layers.0.attn.chunk.J.out").def, nullptr);
  EXPECT_EQ(ParseSiteName("layers.0.embed").def, nullptr);  // embed is not a layer's site
  EXPECT_EQ(ParseSiteName("attn.q").def, nullptr);          // and attn.q is one
}

TEST(SiteName, FormatAndParseAreInverse) {
  for (const SiteDef& def : AllSites()) {
    if (def.name.find(".J.") != std::string_view::npos) continue;
    const std::string name = FormatSiteName(def.per_layer ? 7 : -1, def.name);
    EXPECT_EQ(ParseSiteName(name).def, &def) << name;
  }
}

TEST(ExecutionOrder, FollowsTheStep) {
  const char* order[] = {"embed",
                         "layers.0.input_norm",
                         "layers.0.attn.chunk.0.out",
                         "layers.0.attn.chunk.1.out",
                         "layers.0.attn.o_proj.partial",
                         "layers.0.attn.o_proj",
                         "layers.0.out",
                         "layers.0.attn.kv_b_proj.weight",
                         "layers.1.input_norm",
                         "layers.1000.out",
                         "final_norm",
                         "logits",
                         "next_token.margin",
                         "next_token",
                         "something.foreign"};
  for (size_t i = 1; i < std::size(order); ++i) {
    EXPECT_LT(ExecutionOrder(ParseSiteName(order[i - 1])), ExecutionOrder(ParseSiteName(order[i])))
        << order[i - 1] << " before " << order[i];
  }
}

TEST(ParseSiteInputs, AlternativesAndContext) {
  auto inputs = ParseSiteInputs("a,ctx:b|c");
  ASSERT_EQ(inputs.size(), 2u);
  ASSERT_EQ(inputs[0].size(), 2u);
  EXPECT_EQ(inputs[0][1].name, "b");
  EXPECT_TRUE(inputs[0][1].context);
  EXPECT_FALSE(inputs[1][0].context);
  EXPECT_TRUE(ParseSiteInputs("").empty());
}

}  // namespace
}  // namespace assay
