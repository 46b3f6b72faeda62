// The CPU device: a stream is a HostQueue with a worker thread, an event is a ticket of that queue.
#include <atomic>
#include <cstring>
#include <utility>

#include "base/env.h"
#include "base/error.h"
#include "device/device.h"
#include "device/host_queue.h"

namespace bucketwheel {
namespace {

class CpuEvent final : public Event {
 public:
  CpuEvent(std::shared_ptr<HostQueue> queue, uint64_t ticket) : queue_(std::move(queue)), ticket_(ticket) {}

  bool query() const override {
    if (queue_->is_done(ticket_)) {
      return true;
    }
    queue_->expect_same_process();
    return false;
  }

  bool synchronize(Deadline deadline) const override { return queue_->wait_for(ticket_, deadline); }

  double elapsed_s(const Event& start) const override {
    const auto* first = dynamic_cast<const CpuEvent*>(&start);
    BW_EXPECTS(first != nullptr, "elapsed_s: the events are of different devices");
    BW_EXPECTS(time_ && first->time_, "elapsed_s: both events must be recorded with timing");
    BW_EXPECTS(query() && first->query(), "elapsed_s: both events must be complete");
    return std::chrono::duration<double>(*time_ - *first->time_).count();
  }

 private:
  friend class CpuStream;
  const std::shared_ptr<HostQueue> queue_;
  const uint64_t ticket_;
  // Set: recorded with timing. The time is written before the ticket is done and read after.
  std::shared_ptr<Clock::time_point> time_;
};

class CpuStream final : public Stream {
 public:
  explicit CpuStream(std::shared_ptr<HostQueue> queue) : queue_(std::move(queue)) {}
  ~CpuStream() override { queue_->close(); }

  void run(std::function<void()> task) override {
    BW_EXPECTS(task != nullptr, "stream '" + queue_->name() + "': run() got no task");
    queue_->push({std::move(task), nullptr});
  }

  EventRef record(bool timing) override {
    queue_->expect_open();
    if (!timing) {
      return std::make_shared<CpuEvent>(queue_, queue_->last_ticket());
    }
    auto time = std::make_shared<Clock::time_point>();
    const uint64_t ticket = queue_->push({[time] { *time = Clock::now(); }, nullptr});
    auto event = std::make_shared<CpuEvent>(queue_, ticket);
    event->time_ = std::move(time);
    return event;
  }

  void wait(const EventRef& event) override {
    BW_EXPECTS(event != nullptr, "stream '" + queue_->name() + "': wait() got no event");
    queue_->expect_open();
    const auto* own = dynamic_cast<const CpuEvent*>(event.get());
    if ((own != nullptr && own->queue_ == queue_) || event->query()) {
      return;  // the queue's own order, or nothing to wait for
    }
    queue_->push({nullptr, event});
  }

  bool synchronize(Deadline deadline) override {
    queue_->expect_same_process();
    return queue_->wait_for(queue_->last_ticket(), deadline);
  }

  void close() noexcept override { queue_->close(); }

 private:
  const std::shared_ptr<HostQueue> queue_;
};

class CpuDevice final : public Device {
 public:
  DeviceId id() const override { return {DeviceId::Kind::kCpu, 0}; }

  StreamRef new_stream(std::string name) override {
    return new_stream(std::move(name), HostQueue::RunBy::kWorkerOrWaiter);
  }

  StreamRef new_stream(std::string name, HostQueue::RunBy run_by) {
    const Env& options = env();
    uint64_t seed = 0;
    if (options.stream_fuzz_seed) {
      const uint64_t number = streams_made_.fetch_add(1, std::memory_order_relaxed);
      seed = (*options.stream_fuzz_seed + 1) * 0xD1342543DE82EF95u + number * 0xAF251AF3B0F025B5u + 1;
    }
    auto queue =
        std::make_shared<HostQueue>(std::move(name), options.stream_inline ? HostQueue::RunBy::kCaller : run_by, seed);
    HostQueue::start_worker(queue);
    return std::make_shared<CpuStream>(std::move(queue));
  }

  void fill(void* data, int byte, size_t size_bytes, Stream* stream) override {
    if (stream == nullptr) {
      std::memset(data, byte, size_bytes);
    } else {
      stream->run([=] { std::memset(data, byte, size_bytes); });
    }
  }
  void read(void* to, const void* from, size_t size_bytes) override { std::memcpy(to, from, size_bytes); }

 private:
  std::atomic<uint64_t> streams_made_{0};
};

CpuDevice& the_cpu() {
  static CpuDevice* const device = new CpuDevice();  // never freed: streams may outlive static destruction
  return *device;
}

}  // namespace

Device& cpu_device() { return the_cpu(); }

StreamRef new_worker_stream(std::string name) {
  return the_cpu().new_stream(std::move(name), HostQueue::RunBy::kWorker);
}

}  // namespace bucketwheel
