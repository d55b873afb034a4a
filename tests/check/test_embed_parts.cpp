// Embedding of a vocabulary that two ranks share: whose rows are zero, and where a rank's part begins.
#include <gtest/gtest.h>

#include "small_trace.h"
#include "verdicts.h"

namespace assay {
namespace {

using testing::Judge;
using testing::Noise;
using testing::SmallTrace;
using Values = std::vector<float>;

constexpr int64_t kHalf = 20, kWidth = 16;

// Rank 1 looks its tokens up `shift` rows on.
CheckResult Shared(int64_t shift) {
  const std::vector<int64_t> tokens = {3, 25, 19, 20, 31, 0, 22, 17, 28, 33};
  const auto n = static_cast<int64_t>(tokens.size());
  const Values table = Noise(2 * kHalf * kWidth, 5);
  SmallTrace t(2);
  const uint64_t a = t.Request(tokens);
  for (int32_t rank = 0; rank < 2; ++rank) {
    Shard shard;
    shard.index = rank;
    shard.count = 2;
    const auto begin = table.begin() + rank * kHalf * kWidth;
    t.Record("embed_tokens.weight", "V h", {kHalf, kWidth}, Values(begin, begin + kHalf * kWidth),
             {.rank = rank, .phase = Phase::kLoad, .shard = shard, .meta = {{"shard_axis", "0"}}});
    Values part;
    for (const int64_t token : tokens) {
      const bool mine = token / kHalf == rank;
      const int64_t row = token + (rank == 1 ? shift : 0);
      for (int64_t c = 0; c < kWidth; ++c) part.push_back(mine ? table[static_cast<size_t>(row * kWidth + c)] : 0.0f);
    }
    t.Record("embed.partial", "T h", {n, kWidth}, part, {.rows = {{a, 0, n, 0, false}}, .rank = rank});
  }
  return Judge(t, {"embedding"});
}

TEST(EmbedParts, RankWhoseRowsBeginElsewhereIsNamed) {
  EXPECT_RULED_OUT(Shared(0));
  const CheckResult r = Shared(4);
  EXPECT_FIRST(r, "embed.partial", "TP-SHARD");
  EXPECT_EQ(r.findings[0].constant_value, -4);
}

}  // namespace
}  // namespace assay
