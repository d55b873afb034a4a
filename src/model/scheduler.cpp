#include "model/scheduler.h"

#include <algorithm>
#include <span>

namespace assay {

void Scheduler::Add(std::vector<int64_t> tokens) {
  Request request;
  request.prompt = static_cast<int64_t>(tokens.size());
  request.tokens = std::move(tokens);
  requests_.push_back(std::move(request));
}

// Decoding first: a long prompt must not stall the requests that are under way.
StepPlan Scheduler::Next() {
  StepPlan plan;
  int64_t budget = options_.max_batch_tokens;
  // Tokens are left to compute: the prompt is under way, or Append gave it one.
  const auto runnable = [&](const Request& r) {
    return !r.finished && r.computed < static_cast<int64_t>(r.tokens.size());
  };
  for (size_t i = 0; i < requests_.size(); ++i) {
    Request& r = requests_[i];
    if (runnable(r) && r.started && r.computed >= r.prompt) {
      Schedule(static_cast<int64_t>(i), 1, &plan);
      --budget;
    }
    // The first request that is not done is the only one that may run.
    if (options_.sequential && !r.finished) break;
  }
  for (size_t i = 0; i < requests_.size(); ++i) {
    Request& r = requests_[i];
    if (runnable(r) && r.computed < r.prompt && budget > 0) {
      // Once, at its first step: blocks registered later are not looked for.
      if (!r.started) TakePrefix(&r);
      int64_t n = r.prompt - r.computed;
      if (options_.chunk > 0) {
        n = std::min({n, options_.chunk, budget});
      } else if (n > budget && plan.rows > 0) {
        break;  // a prompt is not cut without chunks: it waits until it is alone
      }
      Schedule(static_cast<int64_t>(i), n, &plan);
      budget -= n;
    }
    if (options_.sequential && !r.finished) break;
  }
  return plan;
}

// A hit covers whole blocks and leaves at least the last prompt token to compute: its logits are needed. Rows of a
// block that runs in this same step count: a layer writes all rows of a step before any of them is read.
void Scheduler::TakePrefix(Request* r) {
  r->started = true;
  if (!options_.prefix_cache) return;
  int32_t parent = -1;
  while ((r->computed + options_.block_size) < r->prompt) {
    const std::span<const int64_t> tokens(r->tokens.data() + r->computed, static_cast<size_t>(options_.block_size));
    const int32_t block = pool_.FindPrefix(parent, tokens);
    if (block < 0) break;
    pool_.Retain(block);
    r->table.push_back(block);
    r->computed += options_.block_size;
    ++r->registered;
    parent = block;
  }
  r->cached = r->computed;
}

// Registers blocks as they fill up, in this very step: a request behind in the same step may then share them.
void Scheduler::Schedule(int64_t index, int64_t n, StepPlan* plan) {
  Request& r = requests_[static_cast<size_t>(index)];
  r.started = true;
  StepSequence s;
  s.request = index;
  s.first_row = plan->rows;
  s.n_rows = n;
  s.first_position = r.computed;
  s.decode = r.computed >= r.prompt;
  s.prefix_hit = !s.decode && r.cached > 0;
  r.computed += n;
  // The last known token's row: its logits choose what comes next.
  s.samples = r.computed == static_cast<int64_t>(r.tokens.size());
  // Blocks are taken as positions need them, never in advance.
  while (static_cast<int64_t>(r.table.size()) * options_.block_size < r.computed) r.table.push_back(pool_.Allocate());
  if (options_.prefix_cache) {
    while ((r.registered + 1) * options_.block_size <= r.computed) {
      const auto b = static_cast<size_t>(r.registered);
      const std::span<const int64_t> tokens(r.tokens.data() + r.registered * options_.block_size,
                                            static_cast<size_t>(options_.block_size));
      pool_.RegisterPrefix(b == 0 ? -1 : r.table[b - 1], tokens, r.table[b]);
      ++r.registered;
    }
  }
  plan->sequences.push_back(s);
  plan->rows += n;
}

void Scheduler::Append(int64_t request, int64_t token) {
  requests_[static_cast<size_t>(request)].tokens.push_back(token);
}

// In reverse, so that the pool hands them out again in the table's order.
void Scheduler::Finish(int64_t request) {
  Request& r = requests_[static_cast<size_t>(request)];
  r.finished = true;
  for (auto it = r.table.rbegin(); it != r.table.rend(); ++it) pool_.Release(*it);
}

}  // namespace assay
