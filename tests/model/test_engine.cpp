// What must not matter does not: attention path, chunking, sharding, batching, prefix sharing, block size, streaming
// and threads change a logit by rounding alone.
//
// Bound of a logit's difference between two orders of the same sums. A sum of K <= 1024 terms is off by about
// sqrt(K) u of its size when the signs of the rounding errors are random (u unit roundoff); the residual stream takes
// up some 20 such sums a layer in 4 layers, whose errors are independent: sqrt(80) sqrt(1024) u * 24 (the largest
// logit) = 6.9e3 u. The tests allow 2.5e4 u for what is not random. A planted fault is hundreds of times above it,
// which BoundIsFarBelowAFault checks.
#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include "engine_runs.h"
#include "model/engine.h"
#include "model/numerics.h"
#include "trace/request_key.h"

namespace assay::testing {
namespace {

constexpr double kFactor = 2.5e4;
constexpr double kBoundF32 = kFactor * 0x1p-24;
constexpr double kBoundF64 = kFactor * 0x1p-53;

std::vector<PromptInput> TwoPrompts() { return {{PromptA(), {}}, {PromptB(), {}}}; }

RunResult MustRun(const EngineOptions& options, const std::vector<PromptInput>& prompts) {
  auto run = RunModel(options, prompts);
  EXPECT_TRUE(run.ok()) << run.status().message();
  return run.ok() ? std::move(run).value() : RunResult();
}

// Of all logits of both runs; a row that only one run has is a failure.
double LargestDifference(const RunResult& a, const RunResult& b) {
  EXPECT_EQ(a.logits.size(), b.logits.size());
  double worst = 0;
  for (const auto& [key, row] : a.logits) {
    const auto other = b.logits.find(key);
    if (other == b.logits.end()) {
      ADD_FAILURE() << "no logits for prompt " << key.first << " position " << key.second;
      continue;
    }
    for (size_t i = 0; i < row.size(); ++i) worst = std::max(worst, std::fabs(row[i] - other->second[i]));
  }
  return worst;
}

// Greedy, six tokens, whole prompts, the logits of every row: what the variants are compared with.
EngineOptions Base(ComputeDType dtype = ComputeDType::kF64) {
  EngineOptions options;
  options.dtype = dtype;
  options.max_tokens = 6;
  options.ignore_eos = true;
  options.all_logits = true;
  return options;
}

// Logits within the bound, and the same tokens: no prompt here is so near a tie that rounding could change one.
void ExpectSame(const EngineOptions& a, const EngineOptions& b, const std::vector<PromptInput>& prompts, double bound) {
  const RunResult x = MustRun(a, prompts), y = MustRun(b, prompts);
  EXPECT_LE(LargestDifference(x, y), bound);
  for (size_t i = 0; i < x.generations.size(); ++i) EXPECT_EQ(x.generations[i].tokens, y.generations[i].tokens);
}

class BothTypes : public ::testing::TestWithParam<ComputeDType> {
 protected:
  double bound() const { return GetParam() == ComputeDType::kF64 ? kBoundF64 : kBoundF32; }
};
INSTANTIATE_TEST_SUITE_P(Types, BothTypes, ::testing::Values(ComputeDType::kF32, ComputeDType::kF64));

// The two attention paths of MLA (DeepSeek-V2, section 2.1.2) are one formula, bracketed in two ways.
TEST_P(BothTypes, AbsorbedEqualsMaterialised) {
  EngineOptions absorbed = Base(GetParam());
  absorbed.path = AttentionPath::kAbsorbed;
  ExpectSame(Base(GetParam()), absorbed, TwoPrompts(), bound());
}

// Chunks of one row, chunks that end inside of a block and at its edge, and one that is longer than the prompt.
TEST_P(BothTypes, ChunkedPrefillEqualsWhole) {
  for (const auto path : {AttentionPath::kMaterialised, AttentionPath::kAbsorbed}) {
    for (const int64_t chunk : {1, 3, 4, 7, 64}) {
      EngineOptions whole = Base(GetParam()), chunked = Base(GetParam());
      whole.path = chunked.path = path;
      chunked.chunk = chunk;
      ExpectSame(whole, chunked, TwoPrompts(), bound());
    }
  }
}

TEST_P(BothTypes, ShardsEqualOneRank) {
  for (const auto path : {AttentionPath::kMaterialised, AttentionPath::kAbsorbed}) {
    for (const int shards : {2, 4}) {
      EngineOptions one = Base(GetParam()), many = Base(GetParam());
      one.path = many.path = path;
      many.shards = shards;
      ExpectSame(one, many, TwoPrompts(), bound());
    }
  }
}

TEST_P(BothTypes, BatchedEqualsSequential) {
  EngineOptions sequential = Base(GetParam());
  sequential.sequential = true;
  std::vector<PromptInput> prompts = TwoPrompts();
  prompts.push_back({{17}, {}});
  prompts.push_back({PromptA(), {}});  // an equal prompt, told apart by its ordinal
  ExpectSame(Base(GetParam()), sequential, prompts, bound());
}

TEST_P(BothTypes, StepsThatMixPrefillAndDecodeEqualSeparateOnes) {
  EngineOptions mixed = Base(GetParam());
  mixed.chunk = 4;
  mixed.max_batch_tokens = 6;
  ExpectSame(Base(GetParam()), mixed, TwoPrompts(), bound());
}

// 256 is one block for all; 1 and 3 cut every gather.
TEST_P(BothTypes, BlockSizeDoesNotMatter) {
  for (const auto path : {AttentionPath::kMaterialised, AttentionPath::kAbsorbed}) {
    for (const int64_t block : {1, 3, 256}) {
      EngineOptions a = Base(GetParam()), b = Base(GetParam());
      a.path = b.path = path;
      b.block_size = block;
      ExpectSame(a, b, TwoPrompts(), bound());
    }
  }
}

// Weights loaded a layer at a time are the same numbers in the same sums: no rounding to allow for.
TEST_P(BothTypes, StreamingWeightsDoesNotMatter) {
  EngineOptions stream = Base(GetParam());
  stream.stream = true;
  ExpectSame(Base(GetParam()), stream, {{PromptA(), {}}}, 0);
}

TEST_P(BothTypes, ThreadsDoNotMatter) {
  EngineOptions threads = Base(GetParam());
  threads.threads = 2;
  ExpectSame(Base(GetParam()), threads, {{PromptA(), {}}}, bound());
}

// Logits of shared rows are not computed, so only tokens can be compared for them. 10 + 11 + 10 rows of prompts.
TEST(Engine, PrefixCacheSharesBlocksAndChangesNothing) {
  std::vector<PromptInput> prompts = {{PromptA(), {}}, {PromptA(), {}}, {PromptA(), {}}};
  prompts[1].tokens.push_back(305);
  for (const auto path : {AttentionPath::kMaterialised, AttentionPath::kAbsorbed}) {
    EngineOptions off = Base(), on = Base();
    off.path = on.path = path;
    off.block_size = on.block_size = 4;
    on.prefix_cache = true;
    off.all_logits = on.all_logits = false;
    ExpectSame(off, on, prompts, kBoundF64);
    const auto rows = [&](const EngineOptions& options) {
      auto engine = Engine::Create(Model(), Config(), options);
      EXPECT_TRUE(engine.ok());
      EXPECT_TRUE((*engine)->Generate(prompts, nullptr).ok());
      return (*engine)->stats().prefill_tokens;
    };
    EXPECT_EQ(rows(off), 31);
    EXPECT_EQ(rows(on), 31 - 2 * 8);  // two later requests take two full blocks each
  }
}

// Above zero, or both would have run in the same type.
TEST(Engine, F32AgreesWithF64WithinTheBound) {
  for (const auto path : {AttentionPath::kMaterialised, AttentionPath::kAbsorbed}) {
    EngineOptions f32 = Base(ComputeDType::kF32), f64 = Base();
    f32.path = f64.path = path;
    f32.all_logits = f64.all_logits = true;
    const double difference = LargestDifference(MustRun(f32, TwoPrompts()), MustRun(f64, TwoPrompts()));
    EXPECT_LE(difference, kBoundF32);
    EXPECT_GT(difference, 0);
  }
}

TEST(Engine, BoundIsFarBelowAFault) {
  EngineOptions faulty = Base();
  faulty.fault = "scale-nope-dim@3";
  EXPECT_GT(LargestDifference(MustRun(Base(), {{PromptA(), {}}}), MustRun(faulty, {{PromptA(), {}}})), 100 * kBoundF32);
}

// Each logit is a bf16 number, further from float32 than rounding in float32 explains, and as near as bf16 should be.
TEST(Engine, Bf16RunIsRoundedAndNearF32) {
  EngineOptions bf16 = Base(ComputeDType::kBF16);
  bf16.max_tokens = 1;
  EngineOptions f32 = Base(ComputeDType::kF32);
  f32.max_tokens = 1;
  const RunResult a = MustRun(bf16, {{PromptA(), {}}}), b = MustRun(f32, {{PromptA(), {}}});
  const double difference = LargestDifference(a, b);
  EXPECT_GT(difference, kBoundF32);
  EXPECT_LT(difference, kFactor * 0x1p-8 / 10);
  for (const auto& [key, row] : a.logits) {
    for (const double v : row) ASSERT_EQ(v, static_cast<double>(RoundToBf16(static_cast<float>(v))));
  }
}

TEST(Engine, ForcedTokensAreFollowedAndGiveTheSameLogits) {
  EngineOptions options = Base();
  const RunResult free = MustRun(options, {{PromptA(), {}}});
  const RunResult forced = MustRun(options, {{PromptA(), free.generations[0].tokens}});
  EXPECT_EQ(free.generations[0].tokens, forced.generations[0].tokens);
  EXPECT_EQ(LargestDifference(free, forced), 0);
  const RunResult other = MustRun(options, {{PromptA(), {5, 6, 7}}});
  EXPECT_EQ(other.generations[0].tokens, (std::vector<int64_t>{5, 6, 7}));
}

// The draw depends on seed, request and position alone (model/sampling.h).
TEST(Engine, SamplingIsSeededAndIndependentOfTheBatch) {
  EngineOptions options = Base(ComputeDType::kF32);
  options.temperature = 1.0;
  options.seed = 7;
  options.max_tokens = 12;
  const RunResult one = MustRun(options, {{PromptA(), {}}}), again = MustRun(options, {{PromptA(), {}}});
  EXPECT_EQ(one.generations[0].tokens, again.generations[0].tokens);
  const RunResult both = MustRun(options, TwoPrompts());
  EXPECT_EQ(one.generations[0].tokens, both.generations[0].tokens);
  options.seed = 8;
  EXPECT_NE(one.generations[0].tokens, MustRun(options, {{PromptA(), {}}}).generations[0].tokens);
}

TEST(Engine, SecondCallOfGenerateEqualsTheFirst) {
  auto engine = Engine::Create(Model(), Config(), Base());
  ASSERT_TRUE(engine.ok());
  const auto first = (*engine)->Generate(TwoPrompts(), nullptr), second = (*engine)->Generate(TwoPrompts(), nullptr);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ((*first)[0].tokens, (*second)[0].tokens);
  EXPECT_EQ((*first)[1].tokens, (*second)[1].tokens);
}

// 24 is the largest logit: a cache that was garbage would move them by as much.
TEST(Engine, Fp8CacheIsNearAndNotEqual) {
  EngineOptions fp8 = Base();
  fp8.kv_dtype = KvDType::kFp8E4M3;
  const double difference = LargestDifference(MustRun(Base(), {{PromptA(), {}}}), MustRun(fp8, {{PromptA(), {}}}));
  EXPECT_GT(difference, kBoundF32);
  EXPECT_LT(difference, 24);
}

// 16 rows see each other in a window of 16; in one of 15 the earlier rows still see all before them.
TEST(Engine, WindowAsLongAsTheTextChangesNothing) {
  const std::vector<PromptInput> prompts = {{PromptA(), {}}};
  const auto plain = RunModel(Base(), prompts);
  const auto wide = RunModel(Base(), prompts, "", Level::kStats, [] {
    ModelConfig c = Config();
    c.sliding_window = 16;
    return c;
  }());
  const auto narrow = RunModel(Base(), prompts, "", Level::kStats, [] {
    ModelConfig c = Config();
    c.sliding_window = 15;  // the last of 10 + 6 rows no longer sees the first
    return c;
  }());
  ASSERT_TRUE(plain.ok() && wide.ok() && narrow.ok());
  EXPECT_EQ(LargestDifference(*plain, *wide), 0);
  const std::pair<int64_t, int64_t> before{0, 13};
  EXPECT_EQ(plain->logits.at(before), narrow->logits.at(before));
}

// Observation must not move a rounding.
TEST(Engine, RecordingChangesNoBit) {
  TempFolder folder;
  for (const auto path : {AttentionPath::kMaterialised, AttentionPath::kAbsorbed}) {
    EngineOptions options = Base(ComputeDType::kF32);
    options.path = path;
    const RunResult silent = MustRun(options, TwoPrompts());
    const auto traced = RunModel(options, TwoPrompts(), folder.path());
    ASSERT_TRUE(traced.ok()) << traced.status().message();
    EXPECT_EQ(LargestDifference(silent, *traced), 0);
  }
}

// Layers 2 and 3 computed from the recorded output of layer 1: the same bits. Another prompt has no rows there.
TEST(Engine, LayersFromTheMiddleContinueAPayload) {
  TempFolder folder;
  EngineOptions whole = Base();
  whole.max_tokens = 1;
  const auto full = RunModel(whole, {{PromptA(), {}}}, folder.path(), Level::kPayload);
  ASSERT_TRUE(full.ok()) << full.status().message();
  EngineOptions rest = whole;
  rest.first_layer = 2;
  rest.layer_input_trace = folder.path();
  const RunResult continued = MustRun(rest, {{PromptA(), {}}});
  EXPECT_EQ(LargestDifference(*full, continued), 0);

  rest.first_layer = 2;
  const auto other = RunModel(rest, {{PromptB(), {}}});
  ASSERT_FALSE(other.ok());
  EXPECT_EQ(other.status().code(), Code::kBadInput);
}

TEST(Engine, LastLayerEndsTheRunWithoutLogits) {
  EngineOptions options = Base();
  options.last_layer = 2;
  const RunResult run = MustRun(options, {{PromptA(), {}}});
  EXPECT_TRUE(run.logits.empty());
  EXPECT_TRUE(run.generations[0].tokens.empty());
}

TEST(Engine, EventsCarryRequestPositionsAndShards) {
  TempFolder folder;
  EngineOptions options = Base(ComputeDType::kF32);
  options.shards = 2;
  options.max_tokens = 2;
  const auto run = RunModel(options, TwoPrompts(), folder.path());
  ASSERT_TRUE(run.ok()) << run.status().message();
  const std::set<uint64_t> keys = {RequestKey(PromptA(), 0), RequestKey(PromptB(), 0)};
  int q_events = 0, partials = 0;
  for (uint64_t i = 0; i < run->trace->event_count(); ++i) {
    const Event event = run->trace->event(i).Decode();
    const std::string& name = run->trace->site_names()[run->trace->event(i).global_site()];
    if (event.phase == Phase::kLoad) continue;
    for (const Segment& segment : event.segments) EXPECT_TRUE(keys.count(segment.request)) << name;
    if (name == "layers.1.attn.q") {
      ++q_events;
      EXPECT_EQ(event.shard.count, 2);
      EXPECT_EQ(event.shard.index, event.rank);
      EXPECT_EQ(event.shard.col_offset, event.rank * 2 * 256);
      EXPECT_EQ(event.shard.full_cols, 4 * 256);
      EXPECT_EQ(event.shape[1], 2);
    }
    if (name == "layers.1.attn.o_proj.partial") ++partials;
  }
  EXPECT_EQ(q_events, 2 * 2);  // ranks x steps
  EXPECT_EQ(partials, 2 * 2);
}

TEST(Engine, OptionsThatDoNotFitAreRefused) {
  const std::vector<PromptInput> prompts = {{PromptA(), {}}};
  const auto refused = [&](const std::function<void(EngineOptions*)>& change) {
    EngineOptions options = Base();
    change(&options);
    const auto run = RunModel(options, prompts);
    EXPECT_FALSE(run.ok());
    return run.status().code();
  };
  EXPECT_EQ(refused([](EngineOptions* o) { o->shards = 3; }), Code::kUsage);
  EXPECT_EQ(refused([](EngineOptions* o) { o->shards = 0; }), Code::kUsage);
  EXPECT_EQ(refused([](EngineOptions* o) { o->block_size = 0; }), Code::kUsage);
  EXPECT_EQ(refused([](EngineOptions* o) { o->chunk = -1; }), Code::kUsage);
  EXPECT_EQ(refused([](EngineOptions* o) { o->first_layer = 1; }), Code::kUsage);
  EXPECT_EQ(refused([](EngineOptions* o) { o->last_layer = 5; }), Code::kUsage);
  EXPECT_EQ(refused([](EngineOptions* o) { o->temperature = -1; }), Code::kUsage);
  EXPECT_EQ(RunModel(Base(), {}).status().code(), Code::kUsage);
  EXPECT_EQ(RunModel(Base(), {{{}, {}}}).status().code(), Code::kUsage);
  EXPECT_EQ(RunModel(Base(), {{{2048}, {}}}).status().code(), Code::kUsage);
  EXPECT_EQ(RunModel(Base(), {{{-1}, {}}}).status().code(), Code::kUsage);
}

}  // namespace
}  // namespace assay::testing
