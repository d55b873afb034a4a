#include <gtest/gtest.h>

#include <limits>

#include "diff_test.h"

namespace assay {
namespace {

using testing::DiffTest;
using testing::Matrix;
using testing::ToyModel;
using testing::ToyOptions;

TEST_F(DiffTest, EqualRunsAreTheSame) {
  const DiffResult r = Compare({}, {});
  EXPECT_EQ(r.verdict, Verdict::kSame) << Describe(r);
  EXPECT_EQ(r.coverage.sites_compared, r.coverage.sites_common);
  EXPECT_GT(r.coverage.rows_compared, 100u);
  EXPECT_EQ(r.coverage.rows_only_a, 0u);
}

// The least that two right engines differ by, and it must stay below every bound.
TEST_F(DiffTest, OtherOrderOfSummationIsNoise) {
  ToyOptions b;
  b.backwards = true;
  const DiffResult r = Compare({}, b);
  EXPECT_EQ(r.verdict, Verdict::kNoise) << Describe(r);
}

// Rows meet by request and position, shards by their columns, whatever steps and ranks they were recorded in.
TEST_F(DiffTest, OtherChunksAndShardsAreNoise) {
  ToyOptions a, b;
  a.chunk = 5;
  b.ranks = 2;
  const DiffResult r = Compare(a, b);
  EXPECT_EQ(r.verdict, Verdict::kNoise) << Describe(r);
  EXPECT_EQ(r.coverage.sites_compared, r.coverage.sites_common);
}

TEST_F(DiffTest, Bf16AgainstF32IsNoise) {
  ToyOptions b;
  b.bf16 = true;
  const DiffResult r = Compare({}, b);
  EXPECT_EQ(r.verdict, Verdict::kNoise) << Describe(r);
}

// Every site, each of a few kinds of fault, against a run that also sums in another order.
TEST_F(DiffTest, FaultAtAnySiteIsNamed) {
  const char* sites[] = {"embed",
                         "layers.0.input_norm",
                         "layers.0.attn.q_proj",
                         "layers.1.attn.k_proj",
                         "layers.1.attn.v",
                         "layers.0.attn.out",
                         "layers.1.attn.o_proj",
                         "layers.0.post_norm",
                         "layers.1.mlp.gate",
                         "layers.0.mlp.act",
                         "layers.1.mlp.down",
                         "layers.0.out",
                         "final_norm",
                         "logits"};
  for (const char* site : sites) {
    for (const double size : {1e-3, 0.3}) {
      ToyOptions b;
      b.backwards = true;
      b.fault = [&](const std::string& name, int, int64_t, Matrix* m) {
        if (name != site) return;
        std::mt19937_64 random(5);
        std::normal_distribution<double> normal(1, size);
        for (float& x : m->v) x *= static_cast<float>(normal(random));
      };
      const DiffResult r = Compare({}, b);
      ASSERT_EQ(r.verdict, Verdict::kFault) << site << " " << size << Describe(r);
      EXPECT_EQ(r.findings[0].name, site) << size << Describe(r);
      EXPECT_EQ(r.findings.size(), 1u) << site << " " << size << Describe(r);
    }
  }
}

TEST_F(DiffTest, StaleRowIsNamedWithWhatItRepeats) {
  ToyOptions b;
  Matrix old;
  b.fault = [&](const std::string& name, int request, int64_t first, Matrix* m) {
    if (name != "layers.1.attn.out" || request != 0) return;
    if (first == 0) old = *m;
    if (first == 13) {  // the second decoded row is not written: what the prefill left there remains
      for (int64_t c = 0; c < m->cols; ++c) m->at(0, c) = old.at(1, c);
    }
  };
  const DiffResult r = Compare({}, b);
  ASSERT_EQ(r.verdict, Verdict::kFault);
  const FirstBad& f = r.findings[0];
  EXPECT_EQ(f.name, "layers.1.attn.out");
  EXPECT_EQ(f.layer, 1);
  EXPECT_EQ(f.cls, "UNWRITTEN") << Describe(r);
  ASSERT_EQ(f.positions.size(), 1u);
  EXPECT_EQ(f.positions[0], (std::pair<int64_t, int64_t>(13, 13)));
  EXPECT_EQ(f.step, 2);
  EXPECT_NE(Describe(r).find("position 13 repeats position 1"), std::string::npos) << Describe(r);
}

// Heads 1 and 3 change places: norms of the row stay, those of the two heads do not.
TEST_F(DiffTest, PermutedHeadsAreNamed) {
  ToyOptions b;
  b.fault = [&](const std::string& name, int, int64_t, Matrix* m) {
    if (name != "layers.0.attn.out") return;
    for (int64_t r = 0; r < m->rows; ++r) {
      for (int64_t d = 0; d < ToyModel::kDim; ++d)
        std::swap(m->at(r, ToyModel::kDim + d), m->at(r, 3 * ToyModel::kDim + d));
    }
  };
  const DiffResult r = Compare({}, b);
  ASSERT_EQ(r.verdict, Verdict::kFault);
  EXPECT_EQ(r.findings[0].name, "layers.0.attn.out");
  EXPECT_EQ(r.findings[0].heads, (std::vector<int32_t>{1, 3})) << Describe(r);
}

// Head 3 of 4 is local head 1 of rank 1.
TEST_F(DiffTest, HeadsAndRankAreGlobalWithShards) {
  ToyOptions a, b;
  a.ranks = b.ranks = 2;
  b.fault = [&](const std::string& name, int, int64_t, Matrix* m) {
    if (name != "layers.0.attn.q") return;
    for (int64_t r = 0; r < m->rows; ++r) m->at(r, 3 * ToyModel::kDim + 2) *= -1;
  };
  const DiffResult r = Compare(a, b);
  ASSERT_EQ(r.verdict, Verdict::kFault);
  EXPECT_EQ(r.findings[0].name, "layers.0.attn.q");
  EXPECT_EQ(r.findings[0].heads, (std::vector<int32_t>{3})) << Describe(r);
  EXPECT_EQ(r.findings[0].ranks, (std::vector<int32_t>{1})) << Describe(r);
}

// One NaN among 48 elements; what follows from it is a consequence, not a second finding.
TEST_F(DiffTest, NaNIsNeverSkipped) {
  ToyOptions b;
  b.fault = [&](const std::string& name, int request, int64_t first, Matrix* m) {
    if (name == "layers.0.mlp.up" && request == 1 && first == 0) m->at(2, 7) = std::numeric_limits<float>::quiet_NaN();
  };
  const DiffResult r = Compare({}, b);
  ASSERT_EQ(r.verdict, Verdict::kFault);
  EXPECT_EQ(r.findings[0].name, "layers.0.mlp.up");
  EXPECT_EQ(r.findings[0].cls, "RANGE");
  EXPECT_EQ(r.findings[0].positions[0], (std::pair<int64_t, int64_t>(2, 2)));
  EXPECT_EQ(r.findings.size(), 1u) << Describe(r);
}

TEST_F(DiffTest, ConstantFactorIsFitted) {
  ToyOptions b;
  b.backwards = true;
  b.fault = [&](const std::string& name, int, int64_t, Matrix* m) {
    if (name != "layers.1.attn.o_proj") return;
    for (float& x : m->v) x *= 1.25f;
  };
  const DiffResult r = Compare({}, b);
  ASSERT_EQ(r.verdict, Verdict::kFault);
  EXPECT_EQ(r.findings[0].name, "layers.1.attn.o_proj");
  EXPECT_EQ(r.findings[0].cls, "SCALE");
  EXPECT_EQ(r.findings[0].constant, "B = 1.25 A");
}

// The verdict rests on sketches also where both sides stored values, whose figures stand in the evidence.
TEST_F(DiffTest, FiguresSayWhoseTheyAreAndWhatFrom) {
  for (const bool payloads : {false, true}) {
    for (const bool row_grid : {false, true}) {
      ToyOptions a, b;
      a.payloads = b.payloads = payloads;
      a.row_grid = b.row_grid = row_grid;
      b.fault = [&](const std::string& name, int, int64_t, Matrix* m) {
        if (name == "layers.1.attn.q_proj") m->at(0, 3) += 0.5f;
      };
      const DiffResult r = Compare(a, b);
      ASSERT_EQ(r.verdict, Verdict::kFault);
      const FirstBad& f = r.findings[0];
      EXPECT_EQ(f.method, "diff: sketches");
      EXPECT_EQ(f.measured_of, "relative L2 of B - A");
      EXPECT_EQ(f.measured_from, row_grid ? "estimated from row sketches" : "estimated from segment sketches");
      EXPECT_EQ(Describe(r).find("computed from payloads: ") != std::string::npos, payloads) << Describe(r);
    }
  }
}

// The result is the second rank's part alone: the parts are right, their sum is not.
TEST_F(DiffTest, MissingReductionNamesTheSum) {
  for (const int first_rank : {0, 100}) {
    ToyOptions a, b;
    a.ranks = b.ranks = 2;
    a.first_rank = b.first_rank = first_rank;
    Matrix part;
    b.fault = [&](const std::string& name, int, int64_t, Matrix* m) {
      if (name == "layers.1.mlp.down.partial1") part = *m;
      if (name == "layers.1.mlp.down") *m = part;
    };
    const DiffResult r = Compare(a, b);
    ASSERT_EQ(r.verdict, Verdict::kFault);
    EXPECT_EQ(r.findings[0].name, "layers.1.mlp.down");
    EXPECT_EQ(r.findings[0].cls, "REDUCE") << Describe(r);
  }
}

TEST_F(DiffTest, WrongPartialResultNamesItsRank) {
  ToyOptions a, b;
  a.ranks = b.ranks = 2;
  b.fault = [&](const std::string& name, int, int64_t, Matrix* m) {
    if (name == "layers.0.attn.o_proj.partial1") m->at(0, 3) += 1;
  };
  const DiffResult r = Compare(a, b);
  ASSERT_EQ(r.verdict, Verdict::kFault);
  EXPECT_EQ(r.findings[0].name, "layers.0.attn.o_proj.partial") << Describe(r);
  EXPECT_EQ(r.findings[0].ranks, (std::vector<int32_t>{1}));
}

// A rank alone has recorded the whole as its partial result; two and four have parts that add up to it.
TEST_F(DiffTest, PartialResultsOfOtherNumbersOfRanksAreNoise) {
  const auto run_of = [](int ranks) {
    ToyOptions options;
    options.ranks = ranks;
    options.partial_of_one = true;
    options.payloads = true;
    return options;
  };
  for (const auto& [of_a, of_b] : {std::pair(1, 2), std::pair(4, 1), std::pair(2, 4)}) {
    for (const bool row_grid : {true, false}) {
      for (const bool bf16 : {true, false}) {
        if (bf16 && !row_grid) continue;  // a block of rows has no margin of its own: near ties are not told
        ToyOptions a = run_of(of_a), b = run_of(of_b);
        a.row_grid = b.row_grid = row_grid;
        b.bf16 = bf16;
        const DiffResult r = Compare(a, b);
        EXPECT_EQ(r.verdict, Verdict::kNoise) << of_a << of_b << row_grid << bf16 << Describe(r);
        for (const SiteComparison& site : r.sites) {
          if (site.name.ends_with(".partial")) {
            EXPECT_EQ(site.payload.elements, 0u) << site.name;
          }
        }
      }
    }
  }
}

TEST_F(DiffTest, WrongPartialResultIsNamedAgainstOneRank) {
  for (const auto& [of_a, of_b] : {std::pair(1, 2), std::pair(2, 4)}) {
    ToyOptions a, b;
    a.ranks = of_a;
    b.ranks = of_b;
    a.partial_of_one = b.partial_of_one = true;
    b.fault = [&](const std::string& name, int, int64_t first, Matrix* m) {
      if (name == "layers.0.attn.o_proj.partial1" && first == 0) m->at(3, 3) += 0.01f;
    };
    const DiffResult r = Compare(a, b);
    ASSERT_EQ(r.verdict, Verdict::kFault);
    EXPECT_EQ(r.findings[0].name, "layers.0.attn.o_proj.partial") << Describe(r);
    EXPECT_EQ(r.findings[0].positions, (std::vector<std::pair<int64_t, int64_t>>{{3, 3}})) << Describe(r);
  }
}

// Two shards of keys on four ranks; a whole norm, sum and logits on each. Rank 3's copy is not the first of its shard.
TEST_F(DiffTest, DifferingReplicaOfARankIsNamed) {
  for (const std::string site :
       {"layers.1.attn.k", "layers.0.attn.k_norm.weight", "layers.0.post_norm", "layers.0.out", "layers.1.mlp.down"}) {
    for (const bool both_sharded : {true, false}) {
      for (const bool row_grid : {true, false}) {
        ToyOptions a, b;
        a.ranks = both_sharded ? 4 : 1;
        a.key_shards = both_sharded ? 2 : 1;
        b.ranks = 4;
        b.key_shards = 2;
        a.row_grid = b.row_grid = row_grid;
        b.rank_fault = [&](const std::string& name, int32_t rank, Matrix* part) {
          if (name == site && rank == 3) part->at(0, 3) += 1;
        };
        const DiffResult r = Compare(a, b);
        ASSERT_EQ(r.verdict, Verdict::kFault) << site << Describe(r);
        EXPECT_EQ(r.findings[0].name, site) << Describe(r);
        EXPECT_EQ(r.findings[0].ranks, (std::vector<int32_t>{3})) << site << both_sharded << row_grid << Describe(r);
        EXPECT_NE(Describe(r).find("copies of one tensor differ between ranks of B"), std::string::npos) << Describe(r);
        EXPECT_EQ(r.findings[0].cls, site.find("attn.k") != std::string::npos ? "TP-SHARD" : "UNKNOWN") << Describe(r);
      }
    }
  }
}

// Ranks 2 and 3 hold the same shard, and rank 2 is the one that is wrong.
TEST_F(DiffTest, FirstRankThatDiffersFromItsReplicasIsNamed) {
  ToyOptions a, b;
  a.ranks = b.ranks = 4;
  a.key_shards = b.key_shards = 2;
  b.rank_fault = [&](const std::string& name, int32_t rank, Matrix* part) {
    if (name == "layers.0.attn.k_proj" && rank == 2) part->at(0, 3) += 1;
  };
  const DiffResult r = Compare(a, b);
  ASSERT_EQ(r.verdict, Verdict::kFault);
  EXPECT_EQ(r.findings[0].name, "layers.0.attn.k_proj") << Describe(r);
  EXPECT_EQ(r.findings[0].ranks, (std::vector<int32_t>{2})) << Describe(r);
}

// A sum can be judged from its own recorded parts, so an earlier fault does not hide it as a consequence.
TEST_F(DiffTest, DroppedResidualIsFoundEvenWhenItsInputsDiffer) {
  ToyOptions b;
  Matrix down;
  b.fault = [&](const std::string& name, int, int64_t, Matrix* m) {
    if (name == "layers.0.input_norm") m->at(0, 0) += 0.5f;  // the earlier fault
    if (name == "layers.1.mlp.down") down = *m;
    if (name == "layers.1.out") {
      for (size_t i = 0; i < m->v.size(); ++i) m->v[i] -= down.v[i];
    }
  };
  const DiffResult r = Compare({}, b);
  ASSERT_EQ(r.findings.size(), 2u) << Describe(r);
  EXPECT_EQ(r.findings[0].name, "layers.0.input_norm");
  EXPECT_EQ(r.findings[1].name, "layers.1.out");
  EXPECT_EQ(r.findings[1].measured_of, "relative L2 of the output less its inputs in B");
}

// Between f32 and bf16 the inputs of two right sums differ by far more than one side's own sum may be off.
TEST_F(DiffTest, InputAddedTwiceIsNamedBetweenPrecisions) {
  for (const bool wrong_in_f32 : {false, true}) {
    ToyOptions a, b;
    std::map<std::pair<int, int64_t>, Matrix> down;  // by request and position of row 0
    ToyOptions& wrong = wrong_in_f32 ? a : b;
    wrong.fault = [&](const std::string& name, int request, int64_t first, Matrix* m) {
      if (name == "layers.1.mlp.down") down[{request, first}] = *m;
      if (name != "layers.1.out") return;
      const Matrix& again = down.at({request, first});
      for (size_t i = 0; i < m->v.size(); ++i) m->v[i] += again.v[i];
    };
    b.bf16 = true;
    b.forced = a.forced = {1, 2, 3, 4};
    const DiffResult r = Compare(a, b);
    ASSERT_EQ(r.verdict, Verdict::kFault) << Describe(r);
    EXPECT_EQ(r.findings[0].name, "layers.1.out") << Describe(r);
    EXPECT_EQ(r.findings[0].cls, "REDUCE") << Describe(r);
    const std::string& constant = r.findings[0].constant;
    EXPECT_EQ(constant.substr(0, 8), wrong_in_f32 ? "A = B + " : "B = A + ");
    EXPECT_NEAR(std::stod(constant.substr(8)), 1.0, 0.01) << constant;
    EXPECT_NE(constant.find("x layers.1.mlp.down"), std::string::npos) << constant;
    EXPECT_EQ(r.findings[0].evidence[0], wrong_in_f32 ? "the output is not the sum of its inputs in A, and is in B"
                                                      : "the output is not the sum of its inputs in B, and is in A");
  }
}

// Where a scale or a norm is inside the sum, a row in which that part is small adds up by chance on one side.
TEST_F(DiffTest, ScaledPartIsNoSumThatOneSideMissed) {
  ToyOptions a, b;
  std::map<std::pair<int, int64_t>, Matrix> down;
  const auto scale = [&](const std::string& name, int request, int64_t first, Matrix* m) {
    if (name == "layers.1.mlp.down") down[{request, first}] = *m;
    if (name != "layers.1.out") return;
    const Matrix& part = down.at({request, first});
    for (size_t i = 0; i < m->v.size(); ++i) m->v[i] -= 0.5f * part.v[i];
  };
  a.fault = scale;
  b.fault = [&](const std::string& name, int request, int64_t first, Matrix* m) {
    if (name == "layers.1.mlp.down" && request == 0 && first == 0) {
      for (int c = 0; c < m->cols; ++c) m->at(0, c) *= 1e-6f;  // the fault
    }
    scale(name, request, first, m);
  };
  const DiffResult r = Compare(a, b);
  ASSERT_EQ(r.findings.size(), 1u) << Describe(r);
  EXPECT_EQ(r.findings[0].name, "layers.1.mlp.down");
}

// Rows behind another token compute something else by right; they are neither compared nor counted as right.
TEST_F(DiffTest, LaterRowsOfADifferingTokenAreSetAside) {
  ToyOptions a, b;
  a.prompts.resize(1);
  b.prompts.resize(1);
  a.forced = {1, 2, 3, 4};
  b.forced = {1, 9, 3, 4};  // as if row 12's choice had differed: embed differs from position 13 on
  a.fault = [&](const std::string& name, int, int64_t first, Matrix* m) {
    if (name == "next_token.margin" && first == 12) m->at(0, 0) = 0;
  };
  b.fault = [&](const std::string& name, int request, int64_t first, Matrix* m) {
    a.fault(name, request, first, m);
    if (name == "next_token" && first == 12) m->at(0, 0) = 9;
  };
  const DiffResult r = Compare(a, b);
  EXPECT_NE(r.verdict, Verdict::kFault) << Describe(r);
  EXPECT_GT(r.coverage.rows_set_aside, 0u);
  EXPECT_EQ(r.near_ties.size(), 1u);
}

TEST_F(DiffTest, ChoiceBeyondItsMarginIsAFault) {
  ToyOptions a, b;
  b.fault = [&](const std::string& name, int request, int64_t first, Matrix* m) {
    if (name == "next_token" && request == 0 && first == 13) m->at(0, 0) = 39 - m->at(0, 0);
  };
  const DiffResult r = Compare(a, b);
  ASSERT_EQ(r.verdict, Verdict::kFault) << Describe(r);
  EXPECT_EQ(r.findings[0].name, "next_token");
  EXPECT_EQ(r.findings[0].measured_of, "gap of the scores that changed places, mean of A and B");
  EXPECT_EQ(r.findings[0].measured_from, "computed from recorded margins");
}

// Segments of other chunks have to be added up before they can be compared.
TEST_F(DiffTest, WithoutRowGridsSegmentsAreCompared) {
  ToyOptions a, b;
  a.row_grid = b.row_grid = false;
  b.chunk = 5;
  b.backwards = true;
  DiffResult r = Compare(a, b);
  EXPECT_EQ(r.verdict, Verdict::kNoise) << Describe(r);
  b.fault = [&](const std::string& name, int, int64_t, Matrix* m) {
    if (name == "layers.1.attn.q_proj") m->at(0, 3) += 0.5f;
  };
  r = Compare(a, b);
  ASSERT_EQ(r.verdict, Verdict::kFault);
  EXPECT_EQ(r.findings[0].name, "layers.1.attn.q_proj") << Describe(r);
}

TEST_F(DiffTest, SitesOfOneSideAreCoverageNotFault) {
  ToyOptions b;
  b.only = {"embed", "layers.*.attn.*", "layers.*.out", "logits"};
  b.backwards = true;
  DiffResult r = Compare({}, b);
  EXPECT_EQ(r.verdict, Verdict::kNoise) << Describe(r);
  EXPECT_FALSE(r.coverage.only_a.empty());
  EXPECT_TRUE(r.coverage.only_b.empty());
  // A fault at a site that only one side records shows at the next one both have.
  b.fault = [&](const std::string& name, int, int64_t, Matrix* m) {
    if (name == "layers.1.input_norm") m->at(0, 3) += 0.5f;
  };
  r = Compare({}, b);
  ASSERT_EQ(r.verdict, Verdict::kFault);
  EXPECT_EQ(r.findings[0].name, "layers.1.attn.q_proj") << Describe(r);
}

// Request keys are hashes of the prompts: none is common.
TEST_F(DiffTest, OtherPromptsAreIncomparable) {
  ToyOptions b;
  b.prompts = {{9, 9, 9}};
  const DiffResult r = Compare({}, b);
  EXPECT_EQ(r.verdict, Verdict::kIncomparable) << Describe(r);
  EXPECT_EQ(r.coverage.rows_compared, 0u);
}

TEST_F(DiffTest, EmptyTraceIsIncomparable) {
  ToyOptions b;
  b.only = {"nothing.matches"};
  const DiffResult r = Compare({}, b);
  EXPECT_EQ(r.verdict, Verdict::kIncomparable);
  EXPECT_EQ(r.coverage.sites_b, 0u);
}

// A factor of 1.001 is a fault by the derived bound, and is not at 10 %, unless a later entry of the list is stricter.
TEST_F(DiffTest, GivenToleranceReplacesTheBound) {
  ToyOptions b;
  b.fault = [&](const std::string& name, int, int64_t, Matrix* m) {
    if (name != "layers.1.attn.o_proj") return;
    for (float& x : m->v) x *= 1.001f;
  };
  DiffOptions options;
  EXPECT_EQ(Compare({}, b, options).verdict, Verdict::kFault);
  options.tolerance = "0.1";
  EXPECT_EQ(Compare({}, b, options).verdict, Verdict::kNoise);
  options.tolerance = "0.1,layers.1.attn.o_proj:1e-6";
  const DiffResult r = Compare({}, b, options);
  ASSERT_EQ(r.verdict, Verdict::kFault);
  EXPECT_EQ(r.findings[0].bound_basis, "given tolerance 1e-06");
}

// The floor run shows as much difference as b does: what the user calls noise is noise.
TEST_F(DiffTest, MeasuredFloorRaisesTheBound) {
  ToyOptions b;
  b.fault = [&](const std::string& name, int, int64_t, Matrix* m) {
    if (name != "layers.1.attn.o_proj") return;
    for (float& x : m->v) x *= 1.001f;
  };
  DiffOptions options;
  ToyModel::Run(dir_ + "/floor", b);
  options.floor_trace = dir_ + "/floor";
  const DiffResult r = Compare({}, b, options);
  EXPECT_EQ(r.verdict, Verdict::kNoise) << Describe(r);
}

}  // namespace
}  // namespace assay
