// Tables in device memory for calls that keep none themselves.
#pragma once

#include <map>
#include <mutex>

#include "device/device_cuda.h"

namespace bucketwheel {

// Calls use(table), alone, with a Table (AdamCudaTable, SumsqCudaTable, ...) for calls that have none of their own: one for
// each device, whose device memory is kept from call to call, and one for each call that is captured, because replays read
// what it uploaded. Never freed.
template <class Table, class Use>
void with_cuda_scratch(int device, Stream& stream, Use&& use) {
  if (is_capturing(stream)) {
    use(*new Table(CudaDevice::at(device)));
    return;
  }
  static std::mutex mutex;
  static auto* const all = new std::map<int, Table>();
  std::lock_guard lock(mutex);
  use(all->try_emplace(device, CudaDevice::at(device)).first->second);
}

}  // namespace bucketwheel
