// A CUDA table that runs nothing, of four devices: memory is the host's, copies happen at once, and what streams are given
// is written down; so is which devices a thread sets.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "counted_cuda.h"
#include "device/device_cuda.h"
#include "kernels/adam_cuda.h"
#include "kernels/norm_cuda.h"

namespace recorded_cuda {

using namespace bucketwheel;

inline std::vector<std::string> actions;    // "A: launch_fold", "B: wait for A"
inline std::map<void*, void*> recorded_in;  // events and their streams
inline void* captured = nullptr;            // the stream that is being captured
inline thread_local int current_device = 0;
inline thread_local std::vector<int> devices_set;  // by the calling thread
inline AdamLaunch last_adam;

// Streams are letters.
inline std::string name_of_stream(void* stream) { return {static_cast<char>(reinterpret_cast<uintptr_t>(stream))}; }
inline int note(void* stream, const std::string& what) {
  actions.push_back(name_of_stream(stream) + ": " + what);
  return kCudaSuccess;
}
inline StreamRef stream_named(char name) {
  return CudaDevice::at(0).borrow(reinterpret_cast<void*>(static_cast<uintptr_t>(name)));
}
inline std::vector<std::string> take_actions() { return std::exchange(actions, {}); }

inline int allocate(void** data, size_t size_bytes) {
  *data = std::malloc(size_bytes);
  return kCudaSuccess;
}

inline void install() {
  static const CudaApi api = [] {
    CudaApi made;
    made.is_simulated = true;
    made.error_text = [](int) { return "an error"; };
    made.get_device_count = [](int* count) { return *count = 4, kCudaSuccess; };
    made.get_device = [](int* device) { return *device = current_device, kCudaSuccess; };
    made.set_device = [](int device) {
      devices_set.push_back(current_device = device);
      return kCudaSuccess;
    };
    made.get_multiprocessors = [](int, int* count) { return *count = 2, kCudaSuccess; };
    made.malloc_device = allocate;
    made.malloc_host = [](void** data, size_t size_bytes) {
      static auto* const all = new std::vector<void*>();  // a graph's staging memory is never freed: this is no leak
      const int error = allocate(data, size_bytes);
      all->push_back(*data);
      return error;
    };
    made.free_device = [](void* data) { return std::free(data), kCudaSuccess; };
    made.memcpy_async = [](void* to, const void* from, size_t size_bytes, void* stream) {
      std::memcpy(to, from, size_bytes);
      return note(stream, "upload");
    };
    made.stream_capture_id = [](void* stream, uint64_t* id) {
      return *id = captured != nullptr && stream == captured ? 1 : 0, kCudaSuccess;
    };
    made.exchange_capture_mode = [](int*) { return kCudaSuccess; };
    made.event_create = [](void** event, bool) { return allocate(event, 1); };
    made.event_destroy = made.free_device;
    made.event_query = [](void*) { return kCudaNotReady; };
    made.event_record = [](void* event, void* stream) { return recorded_in[event] = stream, kCudaSuccess; };
    made.stream_wait_event = [](void* stream, void* event) {
      return note(stream, "wait for " + name_of_stream(recorded_in.at(event)));
    };
    made.launch_adam = [](const AdamLaunch& launch, void* stream) {
      last_adam = launch;
      return note(stream, "launch_adam");
    };
    made.launch_adam_scalars = [](const AdamScalarsLaunch&, void* stream) {
      return note(stream, "launch_adam_scalars");
    };
    made.launch_sumsq = [](const SumsqLaunch&, void* stream) { return note(stream, "launch_sumsq"); };
    made.launch_accumulate = [](const AccumulateLaunch&, void* stream) { return note(stream, "launch_accumulate"); };
    made.launch_fold = [](const FoldLaunch&, void* stream) { return note(stream, "launch_fold"); };
    return made;
  }();
  install_cuda_api(&counted(api));
}

}  // namespace recorded_cuda
