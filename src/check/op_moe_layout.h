// Orders in which rows of gate and of up lie in the experts' first weight, its bias and its result.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace assay::op {

// Blocks of so many rows of gate, then as many of up, in turn: 1 is one of each, half of all rows is gate before up.
struct GateUpOrder {
  int64_t block = 1;
  bool up_first = false;
  // Where row i of gate (part 0) or up (part 1) lies.
  int64_t PlaceOf(int64_t i, int part) const {
    return i / block * 2 * block + (up_first ? 1 - part : part) * block + i % block;
  }
  bool operator==(const GateUpOrder&) const = default;
};
// "halves", "interleaved rows", "blocks of 4 rows", each with ", up in front of gate".
std::string NameOf(const GateUpOrder& order, int64_t half);
// Halves, one by one, and blocks of each power of two that divides `half`; each in both orders of gate and up.
std::vector<GateUpOrder> GateUpOrders(int64_t half);
// For each of 2 half places of an array in order `to` the place of the same row in one in order `from`.
std::vector<int64_t> Reorder(const GateUpOrder& from, const GateUpOrder& to, int64_t half);

}  // namespace assay::op
