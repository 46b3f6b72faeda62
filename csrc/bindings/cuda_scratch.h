// CudaScratch: tables in device memory for calls that keep none themselves.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "device/device_cuda.h"

namespace bucketwheel {

// Tables (AdamCudaTable, SumsqCudaTable, ...) for calls that have none of their own: one for each device, whose
// device memory is kept from call to call, and one for each call that is captured, because replays read what it
// uploaded. Never freed.
template <class Table>
class CudaScratch {
 public:
  explicit CudaScratch(CudaDevice& device) : table_(device) {}

  // Calls use(table), alone.
  template <class Use>
  static void with(int device, Stream& stream, Use&& use) {
    if (is_capturing(stream)) {
      use((new CudaScratch(CudaDevice::at(device)))->table_);
      return;
    }
    static std::mutex mutex;
    static auto* const all = new std::map<int, std::unique_ptr<CudaScratch>>();
    std::lock_guard lock(mutex);
    std::unique_ptr<CudaScratch>& one = (*all)[device];
    if (one == nullptr) {
      one = std::make_unique<CudaScratch>(CudaDevice::at(device));
    }
    use(one->table_);
  }

 private:
  Table table_;
};

}  // namespace bucketwheel
