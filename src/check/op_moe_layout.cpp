#include "check/op_moe_layout.h"

namespace assay::op {

std::string NameOf(const GateUpOrder& order, int64_t half) {
  std::string name = order.block == half ? "halves"
                     : order.block == 1  ? "interleaved gate and up"
                                         : "gate and up in blocks of " + std::to_string(order.block) + " rows";
  return order.up_first ? name + ", up in front of gate" : name;
}

std::vector<GateUpOrder> GateUpOrders(int64_t half) {
  std::vector<GateUpOrder> orders;
  if (half < 1) return orders;
  for (bool up_first : {false, true}) {
    orders.push_back({half, up_first});
    for (int64_t block = 1; block < half && half % block == 0; block *= 2) orders.push_back({block, up_first});
  }
  return orders;
}

std::vector<int64_t> Reorder(const GateUpOrder& from, const GateUpOrder& to, int64_t half) {
  std::vector<int64_t> places(static_cast<size_t>(2 * half));
  for (int part : {0, 1}) {
    for (int64_t i = 0; i < half; ++i) places[static_cast<size_t>(to.PlaceOf(i, part))] = from.PlaceOf(i, part);
  }
  return places;
}

}  // namespace assay::op
