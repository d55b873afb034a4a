// Shards, parts and sizes that a forged trace or configuration declares: refused with a reason, never read.
#include <gtest/gtest.h>
#include <unistd.h>

#include <limits>

#include "base/files.h"
#include "check/weights_absorption.h"
#include "check/weights_pieces.h"
#include "io/safetensors.h"

namespace assay {
namespace {

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

class ForgedShards : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = ::testing::TempDir() + "/pieces." + std::to_string(::getpid());
    ASSERT_TRUE(MakeDirs(folder_).ok());
    Write(R"({"num_key_value_heads": 0, "qk_nope_head_dim": 2, "v_head_dim": 2})");
  }

  // One layer: q_proj and k_proj [8, 4], kv_b_proj [8, 4].
  void Write(const std::string& config) {
    std::vector<CheckpointTensor> tensors;
    for (const char* stem : {"q_proj", "k_proj", "kv_b_proj"}) {
      CheckpointTensor t;
      t.name = std::string("model.layers.0.self_attn.") + stem + ".weight";
      t.dtype = DType::kF32;
      t.shape = {8, 4};
      t.data = reinterpret_cast<const std::byte*>(values_);
      t.size_bytes = sizeof values_;
      tensors.push_back(t);
    }
    ASSERT_TRUE(WriteSafetensors(folder_ + "/model.safetensors", tensors, {}).ok());
    ASSERT_TRUE(AtomicWriteFile(folder_ + "/config.json", config).ok());
    auto opened = WeightSource::Open(folder_);
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    source_ = *opened;
    for (const WeightPtr& weight : source_->weights()) index_[CanonicalWeightName(weight->name())] = weight.get();
  }

  MemoryTensor Held(const std::string& name, std::vector<int64_t> shape, Shard shard) const {
    MemoryTensor t;
    t.name = name;
    t.event.dtype = DType::kF32;
    t.event.shape = std::move(shape);
    t.event.shard = shard;
    t.data = reinterpret_cast<const std::byte*>(values_);
    return t;
  }

  // Pieces, every one within its weight.
  size_t Pieces(const MemoryTensor& t, std::string* note) const {
    const std::vector<WeightPiece> pieces = PiecesOf(*source_, index_, t, note);
    for (const WeightPiece& p : pieces) {
      EXPECT_TRUE(p.first_row >= 0 && p.first_col >= 0 && p.first_row + p.rows <= p.weight->rows() &&
                  p.first_col + p.cols <= p.weight->cols());
    }
    return pieces.size();
  }

  float values_[32] = {};
  std::string folder_;
  std::shared_ptr<const WeightSource> source_;
  WeightIndex index_;
};

TEST_F(ForgedShards, OfRowsAndColumnsAreNoPieces) {
  std::string note;
  EXPECT_EQ(Pieces(Held("layers.0.attn.q_proj.weight", {4, 4}, {1, 2, 0, 4}), &note), 1u) << note;
  EXPECT_EQ(Pieces(Held("layers.0.attn.q_proj.weight", {8, 2}, {1, 2, 2, 4}), &note), 1u) << note;
  for (const Shard& shard :
       {Shard{-1, 2, 0, 4}, Shard{2, 2, 0, 4}, Shard{INT32_MIN, 2, 0, 4}, Shard{INT32_MAX, 2, 0, 4}}) {
    note.clear();
    EXPECT_EQ(Pieces(Held("layers.0.attn.q_proj.weight", {4, 4}, shard), &note), 0u) << shard.index;
    EXPECT_NE(note.find("is no shard of"), std::string::npos) << note;
  }
  for (const int64_t first : {int64_t{-1}, int64_t{3}, kHuge, -kHuge}) {
    note.clear();
    EXPECT_EQ(Pieces(Held("layers.0.attn.q_proj.weight", {8, 2}, {1, 2, first, 4}), &note), 0u) << first;
    EXPECT_NE(note.find("is no shard of"), std::string::npos) << note;
  }
}

TEST_F(ForgedShards, OfFusedPartsAreNoPieces) {
  MemoryTensor t = Held("layers.0.attn.qk_proj.weight", {8, 4}, {1, 2, 0, 4});
  std::string note;
  t.event.meta = {{"parts", "q_proj:4,k_proj:4"}};
  EXPECT_EQ(Pieces(t, &note), 2u) << note;
  for (const char* parts : {"q_proj:4,k_proj:9223372036854775807", "q_proj:-4,k_proj:12", "q_proj:9,k_proj:-1"}) {
    t.event.meta = {{"parts", parts}};
    EXPECT_EQ(Pieces(t, &note), 0u) << parts;
  }
  t.event.shard.index = -1;
  t.event.meta = {{"parts", "q_proj:4,k_proj:4"}};
  EXPECT_EQ(Pieces(t, &note), 0u);
}

TEST_F(ForgedShards, NumbersOfHeadsDivideNothing) {
  MemoryTensor t = Held("layers.0.attn.qk_proj.weight", {8, 4}, {0, 2, 0, 4});
  std::string note;
  for (const char* heads : {"0", "-1", "9223372036854775807", "4"}) {  // of the keys, the configuration says 0
    t.event.meta = {{"parts", "q_proj:4,k_proj:4"}, {"rope_permuted", heads}};
    EXPECT_EQ(Pieces(t, &note), 2u) << heads;
  }
}

TEST_F(ForgedShards, OfAbsorbedWeightsAreNotCompared) {
  std::vector<WeightFinding> found;
  const auto note = [&](const Shard& shard) {
    MemoryCheck check;
    CheckAbsorption(*source_, index_, Held("layers.0.attn.W_UK_T", {1, 2, 4}, shard), 0x1p-24, &check, &found);
    return check.note;
  };
  EXPECT_EQ(note({1, 2, 0, 0}), "");
  for (const int32_t index : {-1, INT32_MIN, 2, INT32_MAX}) {
    EXPECT_NE(note({index, 2, 0, 0}).find("does not fit 2 heads"), std::string::npos) << index;
  }
  Write(R"({"qk_nope_head_dim": 9223372036854775807, "v_head_dim": 1})");
  EXPECT_NE(note({1, 2, 0, 0}).find("do not fit"), std::string::npos);
  EXPECT_TRUE(found.empty());
}

}  // namespace
}  // namespace assay
