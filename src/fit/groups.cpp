#include "fit/groups.h"

#include <functional>

namespace assay::fit {

// One pass over the array; group_of is called once an element.
Groups GroupsOf(const Evidence& evidence, Axis axis) {
  const Problem& p = evidence.problem();
  const int64_t width = evidence.width();
  int64_t count = 0;
  std::function<int64_t(int64_t)> group_of;
  switch (axis) {
    case Axis::kAll:
      count = 1;
      group_of = [](int64_t) { return int64_t{0}; };
      break;
    case Axis::kRow:
      count = p.rows;
      group_of = [width](int64_t i) { return i / width; };
      break;
    case Axis::kHead:
      if (p.heads < 2) return {};
      count = p.heads;
      group_of = [&p](int64_t i) { return i / p.cols % p.heads; };
      break;
    case Axis::kColumn:
      count = width;
      group_of = [width](int64_t i) { return i % width; };
      break;
    case Axis::kBlock: {
      if (p.block_rows < 1 || p.block_cols < 1) return {};
      const int64_t across = (width + p.block_cols - 1) / p.block_cols;
      count = across * ((p.rows + p.block_rows - 1) / p.block_rows);
      group_of = [&p, width, across](int64_t i) {
        return i / width / p.block_rows * across + i % width / p.block_cols;
      };
      break;
    }
  }
  Groups groups;
  groups.elements.resize(static_cast<size_t>(count));
  std::vector<uint8_t> wrong(static_cast<size_t>(count));
  for (int64_t i = 0; i < evidence.size(); ++i) {
    const size_t g = static_cast<size_t>(group_of(i));
    groups.elements[g].push_back(i);
    wrong[g] |= evidence.wrong(i);
  }
  for (int64_t g = 0; g < count; ++g) {
    if (wrong[static_cast<size_t>(g)]) groups.wrong.push_back(g);
  }
  return groups;
}

}  // namespace assay::fit
