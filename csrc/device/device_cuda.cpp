#include "device/device_cuda.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "base/error.h"
#include "device/deferred_event.h"

namespace bucketwheel {

namespace {

thread_local bool is_own_thread = false;
// Never freed: it may own Python objects, which must not outlive the interpreter's end by destruction.
std::atomic<const std::function<std::string(int)>*> reclaim{nullptr};

}  // namespace

void own_cuda_thread() { is_own_thread = true; }

CudaGuard::CudaGuard(int index) {
  int current = -1;
  BW_CUDA_TRY(get_device, &current);
  if (current != index) {
    BW_CUDA_TRY(set_device, index);
    before_ = is_own_thread ? -1 : current;
  }
}

// NOLINTNEXTLINE(bugprone-exception-escape): there is a table of calls, or there were no guard
CudaGuard::~CudaGuard() {
  if (before_ >= 0) {
    (void)BW_CUDA_CALL(set_device, before_);  // a destructor tells nobody; the next call will fail and say so
  }
}

RelaxedCapture::RelaxedCapture() { BW_CUDA_TRY(exchange_capture_mode, &mode_); }

// NOLINTNEXTLINE(bugprone-exception-escape): likewise
RelaxedCapture::~RelaxedCapture() { (void)BW_CUDA_CALL(exchange_capture_mode, &mode_); }

uint64_t capture_id(Stream& stream) {
  uint64_t id = 0;
  BW_CUDA_TRY(stream_capture_id, native_stream(stream, "capture_id"), &id);
  return id;
}

bool is_capturing(Stream& stream) { return capture_id(stream) != 0; }

namespace {

// Where the driver is gone, the process ends, and everything of it with the process.
template <class Call>
void at_end(int index, Call&& call) noexcept {
  try {
    CudaGuard guard(index);
    call();
  } catch (const std::exception&) {
  }
}

}  // namespace

class CudaEvent final : public Event {
 public:
  CudaEvent(CudaDevice& device, void* event, bool timing, bool is_captured)
      : device_(device), event_(event), timing_(timing), is_captured_(is_captured) {}
  ~CudaEvent() override {
    if (!is_captured_) {
      device_.give_event(event_, timing_);
      return;
    }
    at_end(device_.index_, [&] { (void)BW_CUDA_CALL(event_destroy, event_); });  // of no use outside of its graph
  }

  bool query() const override {
    expect_usable("query");
    if (is_done_.load(std::memory_order_acquire)) {
      return true;
    }
    CudaGuard guard(device_.index_);
    const RelaxedCapture relaxed;  // somebody on this thread may be capturing something else
    const int error = BW_CUDA_CALL(event_query, event_);
    if (error == kCudaNotReady) {
      return false;
    }
    expect_cuda_success("event_query", error);
    is_done_.store(true, std::memory_order_release);
    return true;
  }

  bool synchronize(Deadline deadline) const override {
    expect_usable("synchronize");
    if (!deadline) {
      CudaGuard guard(device_.index_);
      const RelaxedCapture relaxed;
      BW_CUDA_TRY(event_synchronize, event_);
      is_done_.store(true, std::memory_order_release);
      return true;
    }
    while (!query()) {
      if (has_passed(deadline)) {
        return false;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return true;
  }

  double elapsed_s(const Event& start) const override {
    const auto* first = dynamic_cast<const CudaEvent*>(&start);
    BW_EXPECTS(first != nullptr && &first->device_ == &device_, "elapsed_s: the events are of different devices");
    BW_EXPECTS(timing_ && first->timing_, "elapsed_s: both events must be recorded with timing");
    BW_EXPECTS(query() && first->query(), "elapsed_s: both events must be complete");
    CudaGuard guard(device_.index_);
    float ms = 0;
    BW_CUDA_TRY(event_elapsed_ms, &ms, first->event_, event_);
    return 1e-3 * static_cast<double>(ms);
  }

 private:
  friend class CudaStream;
  friend bool belongs_to_graph(const Event& event);
  void expect_usable(const char* what) const {
    if (is_captured_) {
      throw CaptureError(
          std::string("event ") + what +
          ": the event was recorded while a CUDA graph was captured; it has no completion outside the graph");
    }
    if (device_.process_.is_foreign()) {
      throw DeviceError(std::string("event ") + what + ": CUDA cannot be used in a forked child; use 'spawn'");
    }
  }

  CudaDevice& device_;
  void* const event_;
  const bool timing_;
  const bool is_captured_;
  mutable std::atomic<bool> is_done_{false};
};

bool belongs_to_graph(const Event& event) {
  const auto* own = dynamic_cast<const CudaEvent*>(&event);
  return own != nullptr && own->is_captured_;
}

EventRef on_device(const EventRef& event) {
  if (dynamic_cast<const CudaEvent*>(event.get()) != nullptr) {
    return event;
  }
  if (const auto* deferred = dynamic_cast<const DeferredEvent*>(event.get())) {
    return on_device(deferred->await());
  }
  event->synchronize();  // of the CPU: what comes from there is on the host
  return nullptr;
}

class CudaStream final : public Stream {
 public:
  CudaStream(CudaDevice& device, void* native, std::string name, bool is_owned)
      : device_(device), native_(native), name_(std::move(name)), is_owned_(is_owned) {}
  ~CudaStream() override { close(); }

  void* native() const { return native_; }
  int device_index() const { return device_.index_; }
  // Whether this is open and borrows the stream `native` of `device`.
  bool is_borrowed(const CudaDevice& device, void* native) const {
    return &device == &device_ && native == native_ && !is_owned_ && is_open_.load(std::memory_order_relaxed);
  }

  // For tests and for poison: a host function of the driver, which must not call CUDA.
  void run(std::function<void()> task) override {
    expect_open();
    CudaGuard guard(device_.index_);
    if (is_capturing(*this)) {
      throw CaptureError("stream '" + name_ + "': a host task runs once and cannot be part of a CUDA graph");
    }
    auto owned = std::make_unique<std::function<void()>>(std::move(task));
    BW_CUDA_TRY(launch_host_function, native_, &CudaStream::call, owned.get());
    (void)owned.release();  // call() deletes it
  }

  EventRef record(bool timing) override {
    expect_open();
    CudaGuard guard(device_.index_);
    const bool is_captured = is_capturing(*this);
    void* event = device_.take_event(timing);
    auto made = std::make_shared<CudaEvent>(device_, event, timing, is_captured);
    BW_CUDA_TRY(event_record, event, native_);
    return made;
  }

  void wait(const EventRef& event) override {
    BW_EXPECTS(event != nullptr, "stream '" + name_ + "': wait() got no event");
    expect_open();
    if (const EventRef recorded = on_device(event)) {
      CudaGuard guard(device_.index_);
      const auto& own = static_cast<const CudaEvent&>(*recorded);
      if (!own.is_captured_ && is_capturing(*this)) {
        expect_done(own);
        return;
      }
      BW_CUDA_TRY(stream_wait_event, native_, own.event_);
    }
  }

  bool synchronize(Deadline deadline) override {
    expect_open();
    if (deadline) {
      return record(false)->synchronize(deadline);
    }
    CudaGuard guard(device_.index_);
    BW_CUDA_TRY(stream_synchronize, native_);
    return true;
  }

  void close() noexcept override {
    if (is_open_.exchange(false) && is_owned_ && !device_.process_.is_foreign()) {
      at_end(device_.index_, [&] { (void)BW_CUDA_CALL(stream_destroy, native_); });  // what is queued still runs
    }
  }

 private:
  // A graph cannot wait for what is outside, not even for what is over: CUDA would end the capture.
  void expect_done(const CudaEvent& outside) const {
    if (!outside.query()) {
      throw CaptureError("stream '" + name_ +
                         "' is captured in a CUDA graph, which cannot wait for work that was enqueued before the "
                         "capture and is not done: synchronize before the capture");
    }
  }
  static void call(void* argument) {
    const std::unique_ptr<std::function<void()>> task(static_cast<std::function<void()>*>(argument));
    (*task)();
  }
  void expect_open() const {
    if (!is_open_.load(std::memory_order_acquire)) {
      throw DeviceError("stream '" + name_ + "' is closed");
    }
    if (device_.process_.is_foreign()) {
      throw DeviceError("stream '" + name_ + "': CUDA cannot be used in a forked child; use 'spawn'");
    }
  }

  CudaDevice& device_;
  void* const native_;
  const std::string name_;
  const bool is_owned_;
  std::atomic<bool> is_open_{true};
};

CudaDevice& CudaDevice::at(int index) {
  static std::mutex mutex;
  static std::atomic<CudaDevice*> devices[kMaxDevices];  // never freed: streams may outlive static destruction
  const bool is_index = index >= 0 && index < kMaxDevices;
  if (CudaDevice* const made = is_index ? devices[index].load(std::memory_order_acquire) : nullptr) {
    return *made;
  }
  std::lock_guard lock(mutex);
  if (CudaDevice* const made = is_index ? devices[index].load() : nullptr) {
    return *made;
  }
  int count = 0;
  const int error = BW_CUDA_CALL(get_device_count, &count);
  if (error != kCudaSuccess || !is_index || index >= count) {
    throw DeviceError("cuda:" + std::to_string(index) + " does not exist: there are " + std::to_string(count) +
                      " CUDA devices" +
                      (error != kCudaSuccess ? std::string(": ") + cuda_api().error_text(error) : std::string()));
  }
  auto* const device = new CudaDevice(index);
  devices[index].store(device, std::memory_order_release);
  return *device;
}

CudaDevice::CudaDevice(int index) : index_(index) { BW_CUDA_TRY(get_multiprocessors, index, &multiprocessors_); }

StreamRef CudaDevice::new_stream(std::string name) {
  CudaGuard guard(index_);
  void* native = nullptr;
  BW_CUDA_TRY(stream_create, &native, true);
  return std::make_shared<CudaStream>(*this, native, std::move(name), true);
}

// Callers borrow the same stream again and again: each thread keeps the last one.
StreamRef CudaDevice::borrow(void* native) {
  thread_local std::shared_ptr<CudaStream> last;
  if (last == nullptr || !last->is_borrowed(*this, native)) {
    last = std::make_shared<CudaStream>(*this, native, "borrowed", false);
  }
  return last;
}

int CudaDevice::fill_blocks(int threads) const {
  constexpr int kWaves = 4;
  constexpr int kThreadsPerMultiprocessor = 1024;
  return std::max(1, multiprocessors_) * std::max(1, kThreadsPerMultiprocessor / threads) * kWaves;
}

void set_cuda_reclaim(std::function<std::string(int)> reclaim_caches) {
  reclaim = new std::function<std::string(int)>(std::move(reclaim_caches));
}

std::string reclaim_cuda_memory(int index) {
  const auto* const function = reclaim.load();
  return function != nullptr ? (*function)(index) : "no memory could be freed";
}

void* CudaDevice::allocate(size_t size_bytes) {
  void* data = nullptr;
  CudaGuard guard(index_);
  const RelaxedCapture relaxed;  // somebody may be capturing something else
  int error = BW_CUDA_CALL(malloc_device, &data, size_bytes);
  std::string reclaimed;
  if (error == kCudaOutOfMemory) {
    reclaimed = reclaim_cuda_memory(index_);
    error = BW_CUDA_CALL(malloc_device, &data, size_bytes);
  }
  if (error == kCudaOutOfMemory) {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    BW_CUDA_TRY(mem_get_info, &free_bytes, &total_bytes);
    throw OutOfMemory(std::to_string(size_bytes) + " bytes on cuda:" + std::to_string(index_) + ": out of memory (" +
                      std::to_string(free_bytes) + " of " + std::to_string(total_bytes) + " bytes are free); " +
                      reclaimed);
  }
  expect_cuda_success("malloc_device", error);
  return data;
}

void CudaDevice::free(void* data) noexcept {
  at_end(index_, [data] {
    const RelaxedCapture relaxed;
    (void)BW_CUDA_CALL(free_device, data);
  });
}

void CudaDevice::fill(void* data, int byte, size_t size_bytes, Stream* stream) {
  CudaGuard guard(index_);
  if (stream != nullptr) {
    BW_CUDA_TRY(memset_async, data, byte, size_bytes, native_stream(*stream, "fill"));
    return;
  }
  const RelaxedCapture relaxed;
  const StreamRef own = new_stream("bw-fill");
  BW_CUDA_TRY(memset_async, data, byte, size_bytes, native_stream(*own, "fill"));
  own->synchronize();
}

void CudaDevice::read(void* to, const void* from, size_t size_bytes) {
  CudaGuard guard(index_);
  const RelaxedCapture relaxed;
  BW_CUDA_TRY(memcpy_blocking, to, from, size_bytes);
}

void* CudaDevice::take_event(bool timing) {
  {
    std::lock_guard lock(mutex_);
    std::vector<void*>& free = free_events_[timing ? 1 : 0];
    if (!free.empty()) {
      void* event = free.back();
      free.pop_back();
      return event;
    }
  }
  void* event = nullptr;
  BW_CUDA_TRY(event_create, &event, timing);
  return event;
}

void CudaDevice::give_event(void* event, bool timing) noexcept {
  std::lock_guard lock(mutex_);
  free_events_[timing ? 1 : 0].push_back(event);
}

// [Note: uploads] Uploads go through page-locked blocks. A block is free again when the copy that reads it is done. An
// upload takes the oldest free block that is large enough, or makes a new one. So nobody waits, and after the first
// few steps nothing is allocated.
CudaDevice::Staging CudaDevice::take_staging(size_t size_bytes) {
  {
    std::lock_guard lock(mutex_);
    for (auto it = staging_.begin(); it != staging_.end(); ++it) {
      if (it->size_bytes >= size_bytes && it->last_use->query()) {
        Staging found = std::move(*it);
        staging_.erase(it);
        return found;
      }
    }
  }
  constexpr size_t kSmallest = 4096;
  Staging made;
  made.size_bytes = std::bit_ceil(std::max(size_bytes, kSmallest));
  BW_CUDA_TRY(malloc_host, &made.data, made.size_bytes);
  return made;
}

void CudaDevice::upload(void* to, const void* from, size_t size_bytes, Stream& stream) {
  if (size_bytes == 0) {
    return;
  }
  CudaGuard guard(index_);
  void* const native = native_stream(stream, "upload");
  Staging staging = [&] {
    const RelaxedCapture relaxed;
    return take_staging(size_bytes);
  }();
  std::memcpy(staging.data, from, size_bytes);
  BW_CUDA_TRY(memcpy_async, to, staging.data, size_bytes, native);
  if (is_capturing(stream)) {
    return;  // replays read the block: it is never used again, and never freed
  }
  staging.last_use = stream.record(false);
  std::lock_guard lock(mutex_);
  staging_.push_back(std::move(staging));
}

void expect_on_device(Stream& stream, int index, const char* what) {
  (void)native_stream(stream, what);
  const int found = static_cast<const CudaStream&>(stream).device_index();
  BW_EXPECTS(found == index, std::string(what) + ": the stream is of cuda:" + std::to_string(found) +
                                 ", the communicator of cuda:" + std::to_string(index));
}

void* native_stream(Stream& stream, const char* what) {
  const auto* own = dynamic_cast<const CudaStream*>(&stream);
  BW_EXPECTS(own != nullptr, std::string(what) + ": the stream is not a CUDA stream");
  return own->native();
}

}  // namespace bucketwheel
