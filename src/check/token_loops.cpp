// The same few tokens for ever: the output of a request ends in a cycle. Row digests of next_token suffice, so no text
// has to be stored. A symptom: small models loop by themselves too, so a cycle must be short and go on for long.
#include <algorithm>
#include <map>

#include "check/checks.h"
#include "check/helpers.h"

namespace assay::check {
namespace {

// Bounds of what counts as a fault: a phrase of up to eight tokens, eight times or more, and at least 32 tokens.
constexpr size_t kMaxPeriod = 8;
constexpr size_t kMinRepeats = 8;
constexpr size_t kMinTokens = 32;

class TokenLoops final : public ScanCheck {
 public:
  bool Wants(const SiteName& site, std::string_view) override { return site.stem == "next_token"; }

  void Segment(const Item& item) override {
    const SegmentSummary& s = *item.segment;
    // All ranks sample the same token.
    if (s.padding || item.view->rank() != 0) return;
    for (int32_t r = 0; r < s.n_row_cells; ++r) {
      // A position may come twice (preemption, speculation): the later token is the one that was kept.
      Token& t = requests_[s.request][s.first_position + r];
      t = {item.view->row_digest(item.index, r), item.id};
    }
    last_ = item.id;
  }

  void Finish(const Capture& capture, CheckReport* report) override {
    for (const auto& [request, tokens] : requests_) {
      const RequestInfo* info = capture.Request(request);
      const int64_t prompt = info == nullptr ? 0 : info->prompt_tokens;
      std::vector<std::pair<int64_t, Token>> generated;  // those behind the prompt
      for (const auto& [position, token] : tokens) {
        // The row at the prompt's last position predicts the first generated token.
        if (position + 1 >= prompt) generated.emplace_back(position, token);
      }
      size_t best_period = 0, best_length = 0;
      for (size_t period = 1; period <= kMaxPeriod; ++period) {
        // Length of the tail that equals itself moved by `period`.
        size_t length = period;
        while (length < generated.size() && generated[generated.size() - 1 - length].second.digest ==
                                                generated[generated.size() - 1 - length + period].second.digest) {
          ++length;
        }
        // A multiple of a period fits the same tail: it has to explain more than one further period to take its place.
        if (length >= std::max(kMinTokens, kMinRepeats * period) && length > best_length + period) {
          best_length = length;
          best_period = period;
        }
      }
      if (best_period == 0) {
        if (generated.size() >= kMinTokens) report->Right(last_);
        continue;
      }
      const auto& begin = generated[generated.size() - best_length];
      const auto event = capture.Info(begin.second.event);
      Suspicion s = At(*event, fault_class::kUnknown, 0);
      s.local = false;
      s.bad.request = request;
      s.bad.positions = {{begin.first, generated.back().first}};
      s.bad.constant_value = static_cast<double>(best_period);
      s.bad.constant = "period of the loop in tokens";
      s.bad.measured = static_cast<double>(best_length);
      s.bad.bound = static_cast<double>(std::max(kMinTokens, kMinRepeats * best_period));
      s.bad.bound_basis = "tokens in the loop; so many are taken for a fault";
      s.bad.confidence = 0.4;
      s.bad.evidence.push_back("the last " + std::to_string(best_length) + " tokens repeat every " +
                               std::to_string(best_period) + ", from step " + std::to_string(event->event.step) +
                               " on");
      report->Found(std::move(s));
    }
    if (requests_.empty()) return report->Missing("no next_token was recorded", "record next_token in every step");
    if (report->n_right() == 0 && report->found().empty()) {
      report->Missing("no request generated " + std::to_string(kMinTokens) + " tokens", "record a longer generation");
    }
  }

 private:
  struct Token {
    uint64_t digest = 0;
    EventId event = kNoEvent;
  };
  std::map<uint64_t, std::map<int64_t, Token>> requests_;  // request, position of the row that predicts it
  EventId last_ = kNoEvent;
};

}  // namespace

std::unique_ptr<ScanCheck> MakeTokenLoops() { return std::make_unique<TokenLoops>(); }

}  // namespace assay::check
