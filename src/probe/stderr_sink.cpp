#include "probe/stderr_sink.h"

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <limits>

namespace assay {

// Segments of one event add up: counts and squares sum, extremes join.
std::string FormatEventLine(const std::string& site, const Event& event) {
  std::string line = "assay " + site;
  if (event.dtype != DType::kInvalid) {
    line += ' ';
    line += NameOf(event.dtype);
    line += " [";
    for (size_t i = 0; i < event.shape.size(); ++i) line += (i == 0 ? "" : ", ") + std::to_string(event.shape[i]);
    line += ']';
  }
  if (event.step >= 0) line += " step " + std::to_string(event.step);
  if (event.phase != Phase::kUnknown) {
    line += ' ';
    line += NameOf(event.phase);
  }
  line += " rank " + std::to_string(event.rank);
  if (!event.segments.empty()) {
    double sum_sq = 0;
    double low = std::numeric_limits<double>::infinity(), high = -low;
    uint64_t nan = 0, inf = 0, finite = 0, padding_nonfinite = 0;
    int64_t padding_rows = 0;
    for (const Segment& segment : event.segments) {
      const Stats& s = segment.stats;
      if (segment.padding) {
        padding_rows += segment.n_rows;
        padding_nonfinite += s.nonfinite();
        continue;
      }
      sum_sq += s.sum_sq;
      nan += s.nan;
      inf += s.pos_inf + s.neg_inf;
      // min and max of a segment without finite elements say nothing.
      if (s.count > s.nonfinite()) {
        finite += s.count - s.nonfinite();
        if (s.min < low) low = s.min;
        if (s.max > high) high = s.max;
      }
    }
    char text[160];
    std::snprintf(text, sizeof(text), " norm %.6g", std::sqrt(sum_sq));
    line += text;
    if (finite != 0) {
      std::snprintf(text, sizeof(text), " min %.6g max %.6g", low, high);
      line += text;
    }
    line += " nan " + std::to_string(nan) + " inf " + std::to_string(inf);
    if (padding_rows != 0) {
      line += " padding " + std::to_string(padding_rows) + " non-finite " + std::to_string(padding_nonfinite);
    }
  }
  line += '\n';
  return line;
}

void WriteToStderr(const std::string& line) {
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace assay
