// Reaper: frees what operations kept alive, in a thread of its own. The last owner of a tensor may need the GIL, which
// the watchdog never takes.
#pragma once

#include <vector>

#include "comm/handle.h"

namespace bucketwheel {

void free_later(std::vector<Handle::Keepalive> keepalive);

// The interpreter is about to end, after which nobody may take the GIL: waits for what is being freed; the rest never is.
void stop_freeing() noexcept;

}  // namespace bucketwheel
