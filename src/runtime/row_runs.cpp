#include "runtime/row_runs.h"

namespace assay {

// A padding row breaks a run of real rows and joins the padding rows before it. Nothing is added to a position, which
// may be as large as int64 allows.
std::vector<RowRun> RunsFromRows(const uint64_t* requests, const int64_t* positions, int64_t n_rows) {
  std::vector<RowRun> runs;
  int64_t counted = 0;  // position of a row without positions
  for (int64_t row = 0; row < n_rows; ++row) {
    RowRun here;
    here.request = requests == nullptr ? 0 : requests[row];
    counted = row > 0 && requests != nullptr && requests[row - 1] != requests[row] ? 0 : row == 0 ? 0 : counted + 1;
    here.first_position = positions == nullptr ? counted : positions[row];
    here.padding = here.first_position < 0;
    if (here.padding) here.request = 0;
    here.first_row = row;
    here.n_rows = 1;
    if (!runs.empty()) {
      RowRun& last = runs.back();
      const bool continues = last.padding == here.padding && last.request == here.request &&
                             (here.padding || here.first_position - last.n_rows == last.first_position);
      if (continues) {
        ++last.n_rows;
        continue;
      }
    }
    if (here.padding) here.first_position = 0;
    runs.push_back(here);
  }
  return runs;
}

}  // namespace assay
