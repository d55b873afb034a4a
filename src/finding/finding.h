// A finding: one fault, as every command prints it ("first_bad" in JSON), and the classes that it can be of.
//
// It is a passive value: who finds faults is in compare/ (two traces) and check/ (one trace).
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace assay {

// Classes of faults. docs/adding-a-case.md tells each from its neighbours. kUnknown: no class could be told.
namespace fault_class {
inline constexpr std::string_view kScale = "SCALE";           // softmax scale, rotary factor
inline constexpr std::string_view kRopeForm = "ROPE-FORM";    // pairing of the rotation
inline constexpr std::string_view kRopePos = "ROPE-POS";      // position of the rotation
inline constexpr std::string_view kLse = "LSE";               // base, range or layout of a log-sum-exp
inline constexpr std::string_view kUnwritten = "UNWRITTEN";   // result of an operation never written
inline constexpr std::string_view kPadRead = "PADREAD";       // padding or unowned slots reach real rows
inline constexpr std::string_view kKvIdent = "KV-IDENT";      // rows of another request, position or block
inline constexpr std::string_view kKvScale = "KV-SCALE";      // scale of the cache's codes
inline constexpr std::string_view kStride = "STRIDE";         // strides or layout of an operand
inline constexpr std::string_view kTpShard = "TP-SHARD";      // which rank holds which part
inline constexpr std::string_view kReduce = "REDUCE";         // sum over ranks
inline constexpr std::string_view kQZero = "Q-ZERO";          // zero point
inline constexpr std::string_view kQScale = "Q-SCALE";        // value of a quantisation scale
inline constexpr std::string_view kQLayout = "Q-LAYOUT";      // place of a scale, code or nibble
inline constexpr std::string_view kMoeRoute = "MOE-ROUTE";    // choice or weight of experts
inline constexpr std::string_view kMoeLayout = "MOE-LAYOUT";  // order of gate and up
inline constexpr std::string_view kRange = "RANGE";           // left the range of its dtype
inline constexpr std::string_view kPrecision = "PRECISION";   // rounded coarser than declared
inline constexpr std::string_view kMask = "MASK";             // which keys a query sees
inline constexpr std::string_view kGraph = "GRAPH";           // a captured graph reads what has moved
inline constexpr std::string_view kCompile = "COMPILE";       // compiled or in-place code writes over an operand
inline constexpr std::string_view kLoad = "LOAD";             // weight not loaded, or loaded elsewhere
inline constexpr std::string_view kKernel = "KERNEL";         // wrong on right operands, the same each time
inline constexpr std::string_view kNonDet = "NONDET";         // another result each time
inline constexpr std::string_view kSpec = "SPEC";             // bookkeeping of speculative decoding
inline constexpr std::string_view kUnknown = "UNKNOWN";
}  // namespace fault_class

struct FirstBad {
  std::string name;                                                  // canonical: "layers.2.attn.out"
  int32_t layer = -1;                                                // -1: outside the layers
  int64_t step = -1;                                                 // engine step; -1: of none (weights)
  uint64_t request = 0;                                              // key; 0: of none
  std::vector<std::pair<int64_t, int64_t>> positions;                // inclusive ranges
  std::vector<int32_t> heads;                                        // global head numbers; empty: all or not known
  std::vector<int32_t> ranks;                                        // ranks whose tensor is wrong; empty: not told
  std::string cls;                                                   // one of fault_class
  std::string constant;                                              // fitted constant with its meaning, or empty
  double constant_value = std::numeric_limits<double>::quiet_NaN();  // the number itself; NaN: none
  double measured = 0;                                               // relative L2 difference, or what bound_basis says
  std::string measured_of;            // what it is, and of which side: "relative L2 of B - A"; empty: bound_basis says
  std::string measured_from;          // "estimated from row sketches"; empty: computed from the recorded values
  double bound = 0;                   // what `measured` may be, in the same unit
  std::string bound_basis;            // where the bound comes from, in words with numbers
  std::string method;                 // "diff: sketches", "diff: digests", "check: nonfinite" …
  double confidence = 0;              // 0..1
  std::vector<std::string> evidence;  // sentences with numbers, for people
};

}  // namespace assay
