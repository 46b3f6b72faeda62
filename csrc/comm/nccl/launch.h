// The calls of NCCL that make one operation.
#pragma once

#include "comm/nccl/session.h"
#include "comm/operation.h"
#include "device/stream.h"

namespace bucketwheel {

// Enqueues `op` in `stream`: one call, or one group of calls, and what its sink does with the sums. With the session's
// locks to issue held. NcclError names the call that failed, with NCCL's words; CommError when the session has ended.
// The group is closed in any case; of an operation that failed, part may be in the stream.
void launch_nccl(const NcclSession& session, const Operation& op, Stream& stream);

}  // namespace bucketwheel
