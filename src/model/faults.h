// Planted faults: real mistakes of inference engines, written into the runtime as the mistaken code would act, so that
// a comparison has something true to find. Off by default; a run without a fault pays one integer comparison a hook.
//
// A fault changes what the engine computes, reads or fails to write. It never edits a recorded tensor. Each names the
// canonical site at which the first wrong value is visible, and what a run needs for it to show (FaultNeeds): those
// settings are made for the faulty run and, with "none:NAME", for its clean twin.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/config.h"

namespace assay {

struct EngineOptions;
struct PromptInput;

// One constant a row of the table (fault_table.cpp); not stored anywhere, so the order is free.
enum class FaultId : uint8_t {
  kNone,
  // Outputs that are not written.
  kDecodeOutputUnwritten,
  kEmptyChunkUnwritten,
  kAttentionTail,
  // Memory that belongs to nobody.
  kPadRead,
  kPadRowOverwritesSlot,
  // Rows of somebody else.
  kKvOtherRequest,
  kKvStaleBlockTable,
  kKvSlotOffByOne,
  // Scales of the cache.
  kKvScaleTwice,
  kKvScaleNotRead,
  kKvScaleNotWritten,
  kKvScaleSaturates,
  // Softmax and rotary scales.
  kYarnMscaleDropped,
  kScaleNopeDim,
  kYarnAttentionFactorDropped,
  // Rotary form and positions.
  kRopePairing,
  kRopeQueryPairing,
  kKPeUnrotated,
  kRopeQueryOffByOne,
  kDecodePositionZero,
  kPrefixGap,
  kGraphStalePositions,
  // Log-sum-exp.
  kLseBase2,
  kLseMaxOnly,
  // Strides.
  kMergeSuffixStride,
  kQueryHeadStride,
  kKPeBroadcast,
  // Shards and reductions.
  kRankLoadsShard0,
  kOProjNotReduced,
  kMlpReducedTwice,
  kRoutedNotReduced,
  kSharedReducedTwice,
  kSharedPerRank,
  kNormOverShard,
  // Absorption.
  kWuvWrongHead,
  kWukWrongHead,
  kWukTransposed,
  // Mixture of experts.
  kMoeNoRenorm,
  kMoeBiasInWeights,
  kMoeScalingDropped,
  kMoeExpertOffByOne,
  kMoeGateUpSwapped,
  kMoeGateUpInterleaved,
  kMlpGateUpSwapped,
  // Range and precision.
  kFp16Overflow,
  kBf16Accumulate,
  kRouterBf16,
  kResidualBf16,
  // Masks.
  kWindowOffByOne,
  kWindowDropped,
  kCausalOffByOne,
  // Loading.
  kLmHeadTied,
  kEmbedRowOff,
  kPostNormWeightMissing,
  // Kernels and fusion.
  kGemmKTail,
  kFusedStaleResidual,
  // Quantised weights.
  kQuantScalePow2,
  kQuantZeroPoint,
  kQuantScaleTransposed,
  // Grouped-query attention.
  kGqaHeadMapping,
  kKNormSkipped,
};

// A generated variant of the checkpoint, made in memory while weights are loaded; the clean twin has the same one.
enum class Variant : uint8_t {
  kNone,
  kLargeValues,  // W_UV times 2^16, o_proj times 2^-16: the same function, values beyond the range of f16
  kGqa,          // attention replaced by seeded random grouped-query attention: 4 heads, 2 kv heads of 64, q/k norm
  kFp8Blocks,    // kv_b_proj stored as e4m3 with one scale a 128 x 128 block
  kInt4Groups,   // o_proj stored as int4 with one scale a group of 32, zero point 8
};

// What a layer must be for the fault to exist in it; kNoLayer: the fault is outside the layers.
enum class LayerKind : uint8_t { kAny, kMla, kMoe, kDense, kNoLayer };

struct FaultNeeds {
  std::string_view path = {};  // "", "materialised" or "absorbed"
  int shards = 1;              // at least
  bool chunk = false;          // chunked prefill, at least two pieces of the longest prompt
  bool staggered = false;      // requests whose contexts have different numbers of chunks in one step
  bool fp8 = false;            // fp8 cache with scales
  bool second_prompt = false;
  bool prefix_cache = false;  // and a second prompt with the same beginning
  bool decode = false;        // at least four generated tokens
  int64_t block_size = 0;     // 0: as asked
  bool yarn = false;          // config override: YaRN, factor 4
  bool window = false;        // config override: sliding_window 8
  double routed_scaling = 0;  // config override: routed_scaling_factor; 0: as it is
  Variant variant = Variant::kNone;
  bool float_run = false;  // f32 or f64 arithmetic: a bf16 run does by itself what the fault does
  LayerKind layers = LayerKind::kAny;
};

struct FaultDef {
  FaultId id;
  std::string_view name;       // "decode-output-unwritten"
  std::string_view cls;        // class of the case bank, "UNWRITTEN"
  std::string_view first_bad;  // "layers.N.attn.out", on the materialised path or the one that the fault needs
  std::string_view what;       // one line
  FaultNeeds needs;
  bool before_w_uv = false;  // inside MLA's attention kernel: the absorbed path shows it at attn.latent_out already
};

std::span<const FaultDef> AllFaults();
const FaultDef* FindFault(std::string_view name);  // nullptr when unknown
// The fault's first wrong site when an MLA model runs on the given path.
std::string_view FirstBadOn(const FaultDef& fault, bool absorbed);
// One phrase a need, "path absorbed", "shards >= 2"; the same joined by semicolons, "" when nothing is needed.
std::vector<std::string> ListNeeds(const FaultNeeds& needs);
std::string DescribeNeeds(const FaultNeeds& needs);

// What a run plants. layer -1: in every layer.
struct FaultPlan {
  FaultId id = FaultId::kNone;
  int64_t layer = -1;
  const FaultDef* def = nullptr;  // set for the clean twin too (then id is kNone)

  bool at(FaultId fault, int64_t at_layer) const { return id == fault && (layer < 0 || layer == at_layer); }
  bool is(FaultId fault) const { return id == fault; }
  std::string first_bad_site() const;  // with the number of the (first) layer in place of N
  int64_t first_layer = -1;            // lowest layer at which it is planted
};

// Parses "NAME", "NAME@LAYER", "NAME@all" and "none:NAME" (empty: no fault) and changes options and config to what the
// fault needs. kUsage, naming what does not fit: an unknown name (with the nearest one), a layer where the fault cannot
// exist, a model that it cannot be planted in.
Result<FaultPlan> PlanFault(EngineOptions* options, ModelConfig* config);
// Adds the second prompt that a fault needs, when there is only one, and fits the chunk to the prompts.
void PrepareInputs(const FaultPlan& plan, EngineOptions* options, std::vector<PromptInput>* prompts);

}  // namespace assay
