// The CUDA device: streams, events and transfers of one GPU, through the table of cuda_api.h.
//
// These block the host:
//   Event::synchronize, Stream::synchronize, CudaDevice::read, fill() without a stream
//   Stream::wait for an event of the CPU, or for a DeferredEvent until it is in a stream
//   the first few upload()s, which allocate
// A device is made at its first use and lives as long as the process.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/fork.h"
#include "device/cuda_api.h"
#include "device/device.h"

namespace bucketwheel {

// While alive, `index` is the calling thread's current device; afterwards the one before is again. torch has a CUDA
// runtime of its own that shares the current context with ours, so the device is put back.
//
// In a thread that is ours alone it is not put back: a new thread counts as being on device 0 without having used it,
// and setting that device would make a context there, half a gigabyte of another rank's GPU.
void own_cuda_thread();  // the calling thread is ours alone
class CudaGuard {
 public:
  explicit CudaGuard(int index);
  ~CudaGuard();
  CudaGuard(const CudaGuard&) = delete;
  CudaGuard& operator=(const CudaGuard&) = delete;

 private:
  int before_ = -1;  // -1: nothing to put back
};

// While a stream is captured into a CUDA graph, CUDA refuses calls that could wait or allocate in the whole thread.
// While this is alive it allows them: for calls that have nothing to do with the capture.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_ = 2;  // relaxed; then the one before
};

class CudaDevice final : public Device {
 public:
  static constexpr int kMaxDevices = 256;
  // DeviceError when there is no such device.
  static CudaDevice& at(int index);

  DeviceId id() const override { return {DeviceId::Kind::kCuda, index_}; }
  // Non-blocking (it does not wait for the legacy default stream) and of high priority: communication should not
  // queue behind computation.
  StreamRef new_stream(std::string name) override;
  // A cudaStream_t of somebody else, for instance torch's current stream. Not owned: it must outlive its use.
  StreamRef borrow(void* native);

  // How many blocks of `threads` fill the device several times over.
  int fill_blocks(int threads) const;

  // cudaMalloc. Without free memory the function of set_cuda_reclaim() is called and the request made once more. If
  // that does not help: OutOfMemory, which says how much is free and what was given back.
  void* allocate(size_t size_bytes);
  void free(void* data) noexcept;

  void fill(void* data, int byte, size_t size_bytes, Stream* stream) override;
  void read(void* to, const void* from, size_t size_bytes) override;
  // Enqueues a copy of host memory to the device. The host memory may be changed at once. In a captured stream the
  // bytes are kept for replays until the process ends.
  void upload(void* to, const void* from, size_t size_bytes, Stream& stream);

 private:
  friend class CudaEvent;
  friend class CudaStream;
  explicit CudaDevice(int index);
  void* take_event(bool timing);
  void give_event(void* event, bool timing) noexcept;

  struct Staging {  // page-locked memory of one upload after the other
    void* data = nullptr;
    size_t size_bytes = 0;
    EventRef last_use;
  };
  Staging take_staging(size_t size_bytes);

  const int index_;
  const MadeIn process_;
  int multiprocessors_ = 0;
  std::mutex mutex_;
  std::vector<void*> free_events_[2];  // by timing
  std::vector<Staging> staging_;
};

// Makes caches give back their memory of device `index`. Returns what they did, for messages.
std::string reclaim_cuda_memory(int index);
// Called with the index of a device that has no memory left: empties caches. Returns what it did, for messages.
void set_cuda_reclaim(std::function<std::string(int)> reclaim_caches);

// The number of the CUDA graph capture that a stream made above is part of; 0: none. Numbers are never used again.
uint64_t capture_id(Stream& stream);
bool is_capturing(Stream& stream);

// ValueError unless `stream` is one of CUDA device `index`.
void expect_on_device(Stream& stream, int index, const char* what);
// Whether the event was recorded while a CUDA graph was captured.
bool belongs_to_graph(const Event& event);
// The event that a CUDA stream can wait for instead of `event`. A DeferredEvent: blocks the host until it stands for
// another event. An event of the CPU: blocks the host until it is complete, and returns null.
EventRef on_device(const EventRef& event);
// The cudaStream_t of a stream made above; ValueError, naming `what`, for another stream.
void* native_stream(Stream& stream, const char* what);

}  // namespace bucketwheel
