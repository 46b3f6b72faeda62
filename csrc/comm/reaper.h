// Reaper: frees what operations kept alive, in a thread of its own. The last owner of a tensor may need the GIL, which
// the watchdog never takes.
#pragma once

#include <vector>

#include "comm/handle.h"

namespace bucketwheel {

void free_later(std::vector<Handle::Keepalive> keepalive);

}  // namespace bucketwheel
