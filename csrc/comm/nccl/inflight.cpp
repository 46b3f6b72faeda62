#include "comm/nccl/inflight.h"

#include <algorithm>
#include <new>
#include <thread>
#include <utility>

namespace bucketwheel {
namespace {

constexpr std::chrono::microseconds kDevicePoll{100};

}  // namespace

void Inflight::enter(std::shared_ptr<const Operation> op, Clock::time_point now) {
  std::lock_guard lock(mutex_);
  entered_ = {std::move(op), now};
}

void Inflight::add(Item item) {
  std::lock_guard lock(mutex_);
  entered_.reset();
  if (given_up_with_ != nullptr) {  // while it was being enqueued: its event says nothing about its outcome
    item.outcome->fail(given_up_with_);
    flight_.finished(item.op->seq, false);
  }
  running_.push_back({std::move(item), {}});
}

void Inflight::add_captured(Item item) {
  std::lock_guard lock(mutex_);
  entered_.reset();
  flight_.captured(item.op->seq);
  captured_.push_back(std::move(item));
}

std::vector<Inflight::Item> Inflight::take_finished(size_t most) {
  std::vector<Item> finished;
  std::lock_guard lock(mutex_);
  while (finished.size() < most && !running_.empty()) {
    Item& item = running_.front().item;
    if (item.done == nullptr || !item.done->query()) {
      break;
    }
    flight_.finished(item.op->seq, item.outcome->complete());
    finished.push_back(std::move(item));
    running_.pop_front();
  }
  return finished;
}

std::optional<Inflight::Front> Inflight::front() {
  std::lock_guard lock(mutex_);
  if (running_.empty()) {
    return entered_ ? std::optional(Front{entered_->op, Clock::now() - entered_->since}) : std::nullopt;
  }
  Running& first = running_.front();
  if (!first.since) {
    if (!std::ranges::all_of(first.item.ready, [](const EventRef& event) { return event->query(); })) {
      return {};
    }
    first.since = Clock::now();
    flight_.started(first.item.op->seq);
  }
  return Front{first.item.op, Clock::now() - *first.since};
}

bool Inflight::give_up(const std::exception_ptr& error) {
  std::lock_guard lock(mutex_);
  if (given_up_with_ != nullptr) {
    return false;
  }
  given_up_with_ = error;
  for (Running& running : running_) {
    const Item& item = running.item;
    bool is_done = false;
    try {
      is_done = item.done != nullptr && item.done->query() && item.outcome->complete();
    } catch (const std::exception&) {  // the device is in trouble
    }
    if (!is_done) {
      item.outcome->fail(error);
      flight_.finished(item.op->seq, false);
    }
  }
  return true;
}

bool Inflight::is_settled() const {
  std::lock_guard lock(mutex_);
  return running_.empty() || given_up_with_ != nullptr;
}

void Inflight::await_device(Deadline deadline) noexcept {
  try {
    for (;;) {
      const std::vector<Item> finished = take_finished();
      std::unique_lock lock(mutex_);
      if (running_.empty()) {
        return;
      }
      lock.unlock();
      if (has_passed(deadline)) {
        break;
      }
      std::this_thread::sleep_for(kDevicePoll);
    }
  } catch (const std::exception&) {  // the device is in trouble
  }
  std::lock_guard lock(mutex_);
  new (std::nothrow) std::deque<Running>(std::move(running_));
  running_.clear();
}

}  // namespace bucketwheel
