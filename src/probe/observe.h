// From an Observation to an Event: checks, measures, applies the level and the rule on token ids. No state, no output.
#pragma once

#include "base/status.h"
#include "probe/anomaly_ring.h"
#include "probe/recorder.h"
#include "probe/settings.h"

namespace assay {

// Token ids are content: kept with ASSAY_TOKENS=on or at level payload.
bool StoresTokens(const Settings& settings);

// Fills pending->event (all but its site id, payload, sequence and time; its rank is set before) and the copy for the
// payload. pending->site is set. kUsage when the observation does not fit together.
Status Observe(const Settings& settings, const Observation& observation, PendingEvent* pending);

// NaN or an infinity in a real row; -inf is none in a log-sum-exp, which has it for an empty set.
// Only such events trigger the on-anomaly ring; needs level stats.
bool HasAnomaly(const PendingEvent& pending);

}  // namespace assay
