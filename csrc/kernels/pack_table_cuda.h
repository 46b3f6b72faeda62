// copy_all_cuda: copies, casts, additions and zeros of many tensors in one launch. The host side of CopyLaunch in
// pack_cuda.h.
#pragma once

#include <span>

#include "device/stream.h"
#include "kernels/pack.h"

namespace bucketwheel {

// copy_all() on CUDA device `device`, in `stream`. TypeError, naming the item, for an unknown pair of dtypes; nothing is
// enqueued then.
//
// items                           CUDA calls                                      streams
// up to CopyLaunch::kMaxInline    launch_copy (get_device before it)              independent of each other
// more                            an upload, launch_copy, an event for the next   a call waits for the last one's stream,
//                                 call; a captured call: memory that is kept      whose table in device memory it uses
void copy_all_cuda(int device, std::span<const CopyItem> items, Stream& stream);

}  // namespace bucketwheel
