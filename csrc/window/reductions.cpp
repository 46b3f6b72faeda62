#include "window/reductions.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "base/error.h"
#include "device/device_cuda.h"
#include "kernels/sums_cuda.h"

namespace bucketwheel {
namespace {

constexpr std::chrono::milliseconds kRoomWait{50};
constexpr int kMemoryWindows = 4;  // how long ranks are taken to run different graphs after a window in which they did

// The partial sums of a shard on CUDA, in whatever stream the operation runs in.
class PartialSinkCuda final : public ReduceSink {
 public:
  PartialSinkCuda(CudaDevice& device, const View& to, double* row_sums)
      : sums_(device, to.data, to.dtype, to.numel, {}, row_sums) {}
  bool takes(DType dtype) const override { return shard_takes(sums_.dtype(), dtype); }
  void consume(size_t, int64_t, const void*, int64_t) override {
    throw TypeError("the sink takes sums in device memory, but the communicator is on the cpu");
  }
  void enqueue(size_t, std::span<const void* const> sources, DType dtype, int64_t numel, Stream& stream) override {
    sums_.run(sources, dtype, numel, stream);
  }

 private:
  ShardAccumulatorCuda sums_;
};

}  // namespace

Reductions::Reductions(Reducers reducers, Places& places, int limit, bool is_registered, Aside aside)
    : reducers_(std::move(reducers)),
      places_(places),
      limit_(limit),
      is_registered_(is_registered),
      aside_(std::move(aside)) {}

// ---- memory

HandleRef Reductions::retire(int keep, int wanted) {
  // The last `keep` stay, for the next owner would wait for what has only just begun; unless they have bytes that are wanted.
  const size_t last = running_.size() - std::min(running_.size(), static_cast<size_t>(keep));
  HandleRef in_way;
  for (size_t i = 0; i < running_.size(); ++i) {
    Running& one = running_[i];
    settle_partial(one);
    const bool is_wanted = wanted >= 0 && places_.shares_bytes(wanted, one.memory);
    if (!one.memory || (i >= last && !is_wanted)) {
      continue;
    }
    if (one.steps[0]->is_ordered() || (is_wanted && is_registered_)) {
      places_.leave(one.memory, one.steps[0]->event());
    } else if (in_way == nullptr) {
      in_way = one.steps[0];
    }
  }
  while (!running_.empty() && !running_.front().memory && !running_.front().partial &&
         running_.front().steps.size() == steps_needed()) {
    running_.pop_front();
  }
  return in_way;
}

// Gives the memory of a partial sum on. On the side, or where issuing waits for the peers, only when that is no wait.
void Reductions::settle_partial(Running& one) {
  if (one.partial && one.steps.size() == steps_needed() &&
      ((one.partial.place != nullptr && !reducers_.defers) || one.steps.back()->is_ordered())) {
    sums_->leave(one.partial, one.steps.back()->event());
  }
}

void Reductions::make_room(int wanted) {
  if (!is_on_cpu()) {
    if (uneven_windows_ == 0 || is_registered_) {
      retire(limit_ - 1, wanted);
    }
    return;
  }
  HandleRef in_way = retire(limit_ - 1, wanted);
  if (in_way == nullptr || !(waits_ || is_closing_)) {
    return;
  }
  const Deadline deadline = Clock::now() + kRoomWait;
  while (in_way != nullptr && !has_passed(deadline)) {
    aside_([&] { in_way->await_order(deadline); });
    in_way = retire(limit_ - 1, wanted);
  }
  waits_ = waits_ && in_way == nullptr;
}

// ---- the operations

void Reductions::issue(int bucket, Turn memory, const View& full, IssueOptions options) {
  options.keepalive.push_back(memory.owner);
  const TensorPair pair{full, {nullptr, full.numel / reducers_.shard->world(), full.dtype}};
  const std::shared_ptr<GradSink>& sink = shards_[static_cast<size_t>(bucket)].sink;
  Running next{bucket, {}, std::move(memory), {}, nullptr, options.caller};
  if (reducers_.replicate == nullptr) {
    aside_([&] { next.steps.push_back(reducers_.shard->reduce_scatter({pair}, {}, sink, std::move(options))); });
    last_ = next.steps.back();
    running_.push_back(std::move(next));
    return;
  }
  failing_as_one([&] {
    advance(0);
    take_partial(next, &options.after);
    if (reducers_.takes_turns && last_ != nullptr) {
      options.after.push_back(last_->event());
    }
    options.keepalive.push_back(next.sums);
    options.keepalive.push_back(next.partial.owner);
    aside_([&] {
      next.steps.push_back(reducers_.shard->reduce_scatter({pair}, {}, next.sums->sink, std::move(options)));
    });
    last_ = next.steps.back();
    running_.push_back(std::move(next));
    advance(0);
  });
}

// Issues what can be; and, by waiting where it must, all of the first `until`. In the order of the buckets.
void Reductions::advance(size_t until) {
  for (size_t i = 0; i < running_.size(); ++i) {
    Running& one = running_[i];
    while (one.steps.size() < steps_needed()) {
      if (reducers_.defers && !one.steps.back()->is_ordered()) {
        if (i >= until) {
          return;
        }
        aside_([&] { one.steps.back()->await_order({}); });
      }
      issue_next(one);
    }
  }
}

void Reductions::issue_next(Running& one) {
  const View& full = one.sums->full;
  Comm& replicate = *reducers_.replicate;
  View own{full.data, full.numel / replicate.world(), full.dtype};
  own.data = static_cast<std::byte*>(full.data) + static_cast<size_t>(replicate.rank()) * own.size_bytes();
  const Shard& shard = shards_[static_cast<size_t>(one.bucket)];
  IssueOptions options;
  options.after = {
      one.steps.back()->event()};  // in: the sums are there; out: leave(), for which the next bucket there waits
  options.keepalive = {one.sums, one.partial.owner};
  options.caller = one.caller;
  aside_([&] {
    if (one.steps.size() == 1) {
      one.steps.push_back(replicate.reduce_scatter({{full, own}}, {}, nullptr, std::move(options)));
    } else {
      one.steps.push_back(reducers_.replicate_gathers->all_gather(
          {{full, own}}, std::move(options), std::make_shared<FirstElements>(shard.sink, shard.numel)));
    }
  });
  last_ = one.steps.back();
  settle_partial(one);
}

// After what fails in one of the two groups the other one fails at once, before the watchdog looks.
template <class Body>
void Reductions::failing_as_one(Body&& body) {
  if (reducers_.replicate == nullptr) {
    body();
    return;
  }
  try {
    body();
  } catch (const ValueError&) {
    throw;
  } catch (const std::exception& error) {
    const auto* const known = dynamic_cast<const Error*>(&error);
    const std::string reason = std::string(known != nullptr ? known->name() : "an error") +
                               " in the other group (process_group or replicate_group): " + error.what();
    aside_([&] {
      if (reducers_.tie != nullptr) {
        reducers_.tie->look();  // what a peer has failed is a PeerError in both, and not an abort of this rank's
      }
      reducers_.shard->abort(reason);
      reducers_.replicate->abort(reason);
    });
    throw;
  }
}

void Reductions::wait(const StreamRef& stream) {
  failing_as_one([&] {
    advance(running_.size());
    const bool is_captured = stream != nullptr && is_capturing(*stream);
    std::vector<HandleRef> handles;
    for (const Running& one : running_) {
      for (const HandleRef& step : one.steps) {
        if (!is_captured || step->is_captured()) {  // in a capture the others were waited for before it began
          handles.push_back(step);
        }
      }
    }
    if (last_ != nullptr) {  // it ends after all before it, also those that running_ has no more
      handles.push_back(last_);
    }
    aside_([&] {
      for (const HandleRef& handle : handles) {
        handle->wait(stream.get());
      }
    });
    last_ = nullptr;
  });
  retire(0, -1);
}

void Reductions::end_window(bool is_complete) {
  if (!is_on_cpu() &&
      !(reducers_.shard->sees_peers() && (reducers_.replicate == nullptr || reducers_.replicate->sees_peers()))) {
    uneven_windows_ = is_complete ? std::max(uneven_windows_ - 1, 0) : kMemoryWindows;
  }
  waits_ = true;
  is_closing_ = false;
}

void Reductions::begin_capture() {
  last_ = nullptr;
  for (Running& one : running_) {  // places forget their turns
    for (Turn* const turn : {&one.memory, &one.partial}) {
      if (turn->place != nullptr) {
        *turn = {};
      }
    }
  }
  if (sums_ != nullptr) {
    sums_->forget();
  }
}

void Reductions::forget_captured() {
  std::erase_if(running_, [](const Running& one) { return one.steps.front()->is_captured(); });
  begin_capture();
}

void Reductions::release(const StreamRef& stream) {
  reducers_.tie = nullptr;  // from now on the groups fail apart
  retire(0, -1);
  if (sums_ != nullptr) {
    sums_->release(stream);
  }
}

// ---- partial sums

void Reductions::prepare_sums(std::vector<Shard> shards, PoolPlan plan, const StreamRef& stream) {
  shards_ = std::move(shards);
  if (reducers_.replicate == nullptr) {
    return;
  }
  const PoolRef& pool = reducers_.replicate->pool();
  sums_ = std::make_unique<Places>(pool, pool, std::move(plan), stream);
  partials_.resize(shards_.size());
}

std::shared_ptr<Reductions::Partial> Reductions::partial_in(std::byte* data, int bucket) const {
  const Shard& shard = shards_[static_cast<size_t>(bucket)];
  const int64_t replicas = reducers_.replicate->world();
  const DType dtype = shard_sum_dtype(shard.dtype);
  auto made = std::make_shared<Partial>();
  made->full = {data, (shard.numel + replicas - 1) / replicas * replicas, dtype};
  const View own{data, shard.numel, dtype};
  if (is_on_cpu()) {
    made->sink = std::make_shared<StoringSink>(own);
    return made;
  }
  CudaDevice& device = CudaDevice::at(reducers_.shard->device().index);
  const size_t bytes = sizeof(double) * static_cast<size_t>(ShardAccumulatorCuda::max_spans(0));
  made->row_sums = {device.allocate(bytes), [&device](void* data) { device.free(data); }};
  made->sink = std::make_shared<PartialSinkCuda>(device, own, static_cast<double*>(made->row_sums.get()));
  return made;
}

// Where the sums of the bucket go, and what the reduce-scatter waits for; this thread does not.
void Reductions::take_partial(Running& running, std::vector<EventRef>* after) {
  const int bucket = running.bucket;
  std::shared_ptr<Partial>& planned = partials_[static_cast<size_t>(bucket)];
  if (sums_->is_free(bucket)) {
    std::vector<EventRef> events;
    running.partial = sums_->enter(bucket, &events);
    after->insert(after->end(), events.begin(), events.end());
    if (planned == nullptr) {
      planned = partial_in(running.partial.data, bucket);
    }
    running.sums = planned;
    return;
  }
  const Shard& shard = shards_[static_cast<size_t>(bucket)];
  const size_t replicas = static_cast<size_t>(reducers_.replicate->world());
  const size_t bytes = (static_cast<size_t>(shard.numel) + replicas) * size_of(shard_sum_dtype(shard.dtype));
  running.partial = sums_->enter_side(bytes, "", nullptr);
  running.sums = partial_in(running.partial.data, bucket);
}

}  // namespace bucketwheel
