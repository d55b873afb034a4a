#include "model/follow.h"

#include <cstring>
#include <map>
#include <span>

#include "trace/request_key.h"

namespace assay {

// Ranks record the same choices, so later ones overwrite equal values. All rows are read before prompts are looked
// up: events of one request may lie in any order and file.
Status FollowTrace(const Trace& trace, std::vector<PromptInput>* prompts) {
  const std::string advice = "; record it again with ASSAY_TOKENS=on (--tokens-in-trace)";
  if (prompts->empty()) {
    for (const TraceProcess& process : trace.processes()) {
      for (const RequestInfo& request : process.requests) {
        if (request.tokens.empty()) {
          return Status::BadInput(trace.path() + ": the prompts' tokens are not in the trace" + advice);
        }
        prompts->push_back({request.tokens, {}});
      }
      if (!prompts->empty()) break;  // every process knows all requests
    }
    if (prompts->empty()) return Status::BadInput(trace.path() + ": no request in the trace; give the prompts");
  }
  // Choices by request and position.
  std::map<uint64_t, std::map<int64_t, int64_t>> chosen;
  for (uint64_t i = 0; i < trace.event_count(); ++i) {
    const EventView view = trace.event(i);
    if (trace.site_names()[view.global_site()] != "next_token") continue;
    const Event event = view.Decode();
    if (event.payload.sha256.empty() || event.dtype != DType::kI64 || !event.payload.rows.empty()) continue;
    ASSAY_ASSIGN_OR_RETURN(const std::span<const std::byte> bytes, trace.payload(event.payload));
    const auto stored = static_cast<int64_t>(bytes.size() / sizeof(int64_t));  // rows
    for (const Segment& segment : event.segments) {
      if (segment.n_rows > stored || segment.first_row < 0 || segment.first_row > stored - segment.n_rows) {
        return Status::BadInput(trace.path() + ": the payload of next_token is shorter than its rows");
      }
      for (int64_t r = 0; r < segment.n_rows; ++r) {
        int64_t token;
        std::memcpy(&token, bytes.data() + static_cast<size_t>(segment.first_row + r) * sizeof token, sizeof token);
        chosen[segment.request][segment.first_position + r] = token;
      }
    }
  }
  if (chosen.empty()) return Status::BadInput(trace.path() + ": no tokens of next_token in the trace" + advice);

  std::map<std::vector<int64_t>, int64_t> ordinals;
  for (size_t i = 0; i < prompts->size(); ++i) {
    PromptInput& prompt = (*prompts)[i];
    const auto request = chosen.find(RequestKey(prompt.tokens, ordinals[prompt.tokens]++));
    if (request == chosen.end()) {
      return Status::Usage("prompt " + std::to_string(i + 1) + " is not among the requests of " + trace.path());
    }
    // The choice at a position is the token of the next one; the last prompt row chooses the first generated token.
    for (auto position = static_cast<int64_t>(prompt.tokens.size()) - 1;; ++position) {
      const auto token = request->second.find(position);
      if (token == request->second.end()) break;
      prompt.forced.push_back(token->second);
    }
    if (prompt.forced.empty()) {
      return Status::BadInput(trace.path() + ": no choice after the prompt " + std::to_string(i + 1));
    }
  }
  return {};
}

}  // namespace assay
