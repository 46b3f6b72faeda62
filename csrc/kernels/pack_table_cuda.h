// copy_all_cuda: copies, casts, additions and zeros of many tensors in few launches. The host side of CopyLaunch in
// pack_cuda.h.
#pragma once

#include <span>

#include "device/stream.h"
#include "kernels/pack.h"

namespace bucketwheel {

// copy_all() on CUDA device `device`, in `stream`: a launch for each CopyLaunch::kMaxItems items. TypeError, naming the
// item, for an unknown pair of dtypes; nothing is enqueued then. Calls are independent of each other.
void copy_all_cuda(int device, std::span<const CopyItem> items, Stream& stream);

}  // namespace bucketwheel
