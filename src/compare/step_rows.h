// Which token rows stand behind a tensor that has none: rows sorted by expert, or counts of them, are those of one
// step, so that they correspond on both sides only where the step held the same rows. Nothing is judged here.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "compare/joint_index.h"

namespace assay {

class JointStepRows {
 public:
  // without_rows, with_rows: numbers of joint sites of the two kinds. One pass over the pieces of both, both sides.
  JointStepRows(const JointIndex& index, uint32_t without_rows, uint32_t with_rows);

  // Ascending row numbers of the steps in which `row`, a recording of without_rows, was made; nullptr: the sides' steps
  // hold other rows, or one side lacks the recording.
  const std::vector<uint32_t>* TokensOf(uint32_t row) const;
  // The recordings of without_rows in the steps of a token row; nullptr: none.
  const std::vector<uint32_t>* RecordingsOf(uint32_t token_row) const;

 private:
  std::map<uint32_t, std::vector<uint32_t>> tokens_, recordings_;
};

}  // namespace assay
