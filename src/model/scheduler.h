// Which rows run in which step: continuous batching of requests over a paged cache.
//
// A step takes first one row of every request that is decoding, then prompt tokens of the others in order of arrival,
// up to max_batch_tokens. A prompt runs in one piece (even above the limit, when it is alone) or, with chunk > 0, in
// pieces of chunk tokens. Sequential mode runs one request at a time. Nothing here computes.
#pragma once

#include <cstdint>
#include <vector>

#include "model/kv_cache.h"

namespace assay {

struct SchedulerOptions {
  int64_t block_size = 16;          // positions a block of the cache
  int64_t chunk = 0;                // prompt tokens a step and request; 0: the whole prompt
  int64_t max_batch_tokens = 8192;  // rows a step
  bool prefix_cache = false;        // full blocks with equal prefixes are shared
  bool sequential = false;
};

// One request's rows in a step: tokens[first_position .. first_position + n_rows) of the request.
struct StepSequence {
  int64_t request = 0;                                    // in order of arrival, from 0
  int64_t first_row = 0, n_rows = 0, first_position = 0;  // row in the step; positions of the request
  bool decode = false;                                    // the row is a generated token
  bool samples = false;                                   // the last row's logits choose the next token
  bool prefix_hit = false;  // a prompt row of a request whose beginning came from the prefix cache
};

struct StepPlan {
  int64_t rows = 0;  // of all sequences together
  std::vector<StepSequence> sequences;
};

// Deterministic: the plan follows from the calls so far. Not thread-safe. Requests are numbered as they are added.
class Scheduler {
 public:
  explicit Scheduler(const SchedulerOptions& options) : options_(options) {}

  // In order of arrival. The tokens are the prompt.
  void Add(std::vector<int64_t> tokens);
  // The next step, with blocks allocated for its rows; no rows: all requests are done.
  StepPlan Next();
  // After a step: a sampled token (appended, fed in a later step), or the end of the request (its blocks are freed).
  void Append(int64_t request, int64_t token);
  void Finish(int64_t request);

  // Prompt and what was appended; blocks of positions 0, block_size, …; both valid until the next call that is not
  // const.
  const std::vector<int64_t>& tokens(int64_t request) const { return requests_[static_cast<size_t>(request)].tokens; }
  const std::vector<int32_t>& table(int64_t request) const { return requests_[static_cast<size_t>(request)].table; }
  int64_t blocks() const { return pool_.capacity(); }  // that were ever in use at once

 private:
  struct Request {
    std::vector<int64_t> tokens;  // prompt and generated
    int64_t prompt = 0;           // tokens of the prompt
    int64_t computed = 0;         // positions whose rows are in the cache, or will be after the running step
    int64_t cached = 0;           // prompt tokens taken from the prefix cache
    int64_t registered = 0;       // full blocks known to the prefix index
    bool started = false, finished = false;
    std::vector<int32_t> table;  // blocks of positions 0, block_size, 2 block_size …
  };

  void TakePrefix(Request* request);
  void Schedule(int64_t index, int64_t n, StepPlan* plan);

  SchedulerOptions options_;
  BlockPool pool_;
  std::vector<Request> requests_;
};

}  // namespace assay
