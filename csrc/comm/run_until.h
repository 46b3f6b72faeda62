// run_until: waiting for what may block for ever, in a thread that can be left behind.
#pragma once

#include <functional>

#include "base/deadline.h"

namespace bucketwheel {

// Runs `task` in a thread of its own. False when it has not ended at the deadline: it goes on, so it owns what it uses.
// Rethrows what it threw. `poll`, if given, is called meanwhile and may throw, which ends the waiting likewise.
bool run_until(Deadline deadline, std::function<void()> task, const std::function<void()>& poll = {});

}  // namespace bucketwheel
