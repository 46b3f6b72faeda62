#include "window/window.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "device/cuda_api.h"
#include "device/device_cuda.h"
#include "kernels/pack.h"
#include "kernels/pack_table_cuda.h"

namespace bucketwheel {
namespace {

std::vector<std::vector<int>> buckets_of(const std::vector<BucketSpec>& buckets, size_t params) {
  std::vector<std::vector<int>> out(params);
  for (size_t bucket = 0; bucket < buckets.size(); ++bucket) {
    for (const BucketPart& part : buckets[bucket].parts) {
      out.at(static_cast<size_t>(part.param)).push_back(static_cast<int>(bucket));
    }
  }
  return out;
}

bool are_same(const StreamRef& a, const StreamRef& b) {
  return a == b || native_stream(*a, "window") == native_stream(*b, "window");
}

}  // namespace

// ---- Window

Window::Window(Reducers reducers, PoolRef side_pool, std::vector<BucketSpec> buckets, std::shared_ptr<GradTable> table,
               PoolPlan plan, PoolPlan sums_plan, const WindowOptions& options, const StreamRef& stream, Aside aside)
    : comm_(reducers.shard),
      options_(options),
      aside_(std::move(aside)),
      table_(std::move(table)),
      places_of_(table_->sums.size()),
      schedule_(buckets_of(buckets, table_->sums.size()), static_cast<int>(buckets.size()), options.is_static),
      places_(comm_->pool(), std::move(side_pool), std::move(plan), stream),
      reductions_(std::move(reducers), places_, options.max_inflight, options.is_registered, aside_) {
  std::vector<Reductions::Shard> shards;
  buckets_.reserve(buckets.size());  // places_of_ point into it
  for (BucketSpec& spec : buckets) {
    shards.push_back({spec.sink, spec.shard_numel, spec.dtype});
    buckets_.push_back({std::move(spec), false, {}});
    for (const BucketPart& part : buckets_.back().spec.parts) {
      places_of_[static_cast<size_t>(part.param)].push_back({static_cast<int>(buckets_.size()) - 1, &part});
    }
  }
  reductions_.prepare_sums(std::move(shards), std::move(sums_plan), stream);
}

void Window::open(std::string_view found, const StreamRef& stream, bool is_captured) {
  is_captured_ = is_captured;
  if (is_captured) {  // no event and no memory use from outside of the graph
    for (Bucket& bucket : buckets_) {
      for (Round& round : bucket.rounds) {
        round.streams.clear();
      }
    }
    reductions_.begin_capture();
    places_.forget();
  }
  launched_ = 0;
  prepared_in_ = stream;
  prepared_ = nullptr;
  if (found.find_first_not_of('\0') == std::string_view::npos) {
    table_->forget_all();
  }
  bool has_any = false;
  for (int param = 0; param < static_cast<int>(table_->sums.size()); ++param) {
    if (table_->has_sum(param) && found[static_cast<size_t>(param)] == 0) {
      table_->forget(param);
    }
    has_any = has_any || table_->has_sum(param);
  }
  for (Bucket& bucket : buckets_) {
    const auto has_sum = [this](const BucketPart& part) { return table_->has_sum(part.param); };
    bucket.accumulates = has_any && std::ranges::any_of(bucket.spec.parts, has_sum);
    for (const BucketPart& part : bucket.spec.parts) {
      if (bucket.accumulates && !table_->has_sum(part.param)) {
        table_->zero(part.param, stream.get());
      }
    }
    bucket.rounds[false].phase = Phase::kEmpty;
  }
  is_open_ = true;
}

bool Window::arrive(int param, const Gradient& gradient, bool add, bool launch) {
  const bool has_older = schedule_.has_stored(param) || table_->has_sum(param);
  const std::vector<Place>& places = places_of_[static_cast<size_t>(param)];
  if (schedule_.is_first(param) && (add || !has_older) && places.size() == 1) {
    store({param, places[0].bucket, false, false}, gradient);
    if (schedule_.arrive(param, launch)) {
      launch_all(schedule_.ready(), gradient.stream);
    }
    return true;
  }
  const Actions actions = schedule_.gradient(param, has_older && !add, launch);
  if (schedule_.is_deviation(param)) {
    return false;
  }
  size_t launched = 0;
  for (const StoreAction& action : actions.stores) {
    // A bucket is launched before a later one of the same parameter needs memory, or its place.
    for (; launched < actions.launches.size() && actions.launches[launched].bucket < action.bucket; ++launched) {
      this->launch(actions.launches[launched], gradient.stream);
    }
    store(action, gradient);
  }
  for (; launched < actions.launches.size(); ++launched) {
    this->launch(actions.launches[launched], gradient.stream);
  }
  return true;
}

// ---- a bucket's memory

const BucketPart& Window::part_of(int param, int bucket) const {
  const auto is_there = [bucket](const Place& place) { return place.bucket == bucket; };
  return *std::ranges::find_if(places_of_[static_cast<size_t>(param)], is_there)->part;
}

CopyItem Window::item_of(const Bucket& bucket, const Round& round, const Item& item) const {
  const auto size = static_cast<int64_t>(size_of(bucket.spec.dtype));
  const auto from_size = static_cast<int64_t>(size_of(item.gradient.dtype));
  return {round.memory.data + item.part->begin * size,
          item.gradient.data + item.part->param_begin * from_size,
          item.part->numel,
          bucket.spec.dtype,
          item.gradient.dtype,
          item.add};
}

CopyItem Window::zeros_of(const Bucket& bucket, const Round& round, const BucketPart& part) const {
  const auto size = static_cast<int64_t>(size_of(bucket.spec.dtype));
  return {round.memory.data + part.begin * size, nullptr, part.numel, bucket.spec.dtype, bucket.spec.dtype, false};
}

// Memory for a round. `to_launch`: of the bucket that is launched next. CUDA: `stream` is behind the last use of the bytes.
void Window::enter(Bucket& bucket, bool late, bool to_launch, const StreamRef& stream) {
  Round& round = bucket.rounds[late];
  const int number = static_cast<int>(&bucket - buckets_.data());
  const bool waits_for_others = late ? options_.is_registered || launched_ < static_cast<int>(buckets_.size())
                                     : places_.last_sharing(number) >= launched_;
  const bool is_early = !to_launch && waits_for_others;
  reductions_.make_room(is_early ? -1 : number);
  Device& memory_of = comm_->pool()->device();
  if (!is_early && places_.is_free(number)) {
    std::vector<EventRef> events;
    round.memory = places_.enter(number, &events);
    for (const EventRef& event : events) {
      stream != nullptr ? stream->wait(event) : (void)event->synchronize();
    }
    if (comm_->pool()->is_poisoned() && !is_captured_) {
      memory_of.fill(round.memory.data, kPoison, round.memory.size_bytes, stream.get());
    }
  } else {
    const std::string key = (late ? "late round of bucket " : "bucket ") + std::to_string(number);
    round.memory = places_.enter_side(bucket.bytes(), key, stream);
  }
  if (stream != nullptr) {
    round.streams = {stream};
  }
  if (late) {
    memory_of.fill(round.memory.data, 0, bucket.bytes(), stream.get());
  }
  round.phase = Phase::kFilling;
}

// Runs `items` in `stream`: behind the entry of the memory, and where one `reads` the memory, behind all that wrote there.
void Window::write(Round& round, const StreamRef& stream, std::span<const CopyItem> items, bool reads) {
  if (stream == nullptr) {
    copy_all(items);
    return;
  }
  const auto is_own = [&stream](const StreamRef& other) { return are_same(stream, other); };
  const bool is_new = std::ranges::none_of(round.streams, is_own);
  for (const StreamRef& other : round.streams) {
    if ((is_new || reads) && !is_own(other)) {
      stream->wait(other->record());
    }
  }
  if (is_new) {
    round.streams.push_back(stream);
  }
  copy_all_cuda(device().index, items, *stream);
}

void Window::store(const StoreAction& action, const Gradient& gradient) {
  Bucket& bucket = buckets_[static_cast<size_t>(action.bucket)];
  Round& round = bucket.rounds[action.late];
  const Item item{&part_of(action.param, action.bucket), action.add, gradient};
  round.phase = Phase::kFilling;
  if (gradient.owner != nullptr) {
    const auto is_same = [&item](const Item& other) { return other.part == item.part; };
    if (std::ranges::any_of(round.held, is_same)) {  // what is held may be written to by nobody
      pack(bucket, action.late, false, {});
    }
    round.held.push_back(item);
    held_bytes_ += item.held_bytes();
    held_peak_bytes_ = std::max(held_peak_bytes_, held_bytes_);
    return;
  }
  if (action.add || action.late) {  // behind what is held
    pack(bucket, action.late, false, {});
  }
  if (!round.memory) {
    enter(bucket, action.late, false, gradient.stream);
  }
  const CopyItem copy = item_of(bucket, round, item);
  const auto run = [&] { write(round, gradient.stream, {&copy, 1}, action.add || action.late); };
  if (is_on_cpu() && item.part->numel * static_cast<int64_t>(size_of(gradient.dtype)) > kMostHeldBytes) {
    aside_(run);  // for longer than the interpreter lets a thread keep the GIL
  } else {
    run();
  }
}

// [Note: packed in its stream]
void Window::pack(Bucket& bucket, bool late, bool to_launch, std::span<const int> absent) {
  Round& round = bucket.rounds[late];
  std::vector<int> zeros(absent.begin(), absent.end());
  while (!round.held.empty() || !zeros.empty()) {
    const StreamRef stream = !round.held.empty()     ? round.held.front().gradient.stream
                             : round.streams.empty() ? nullptr
                                                     : round.streams.front();
    if (!round.memory) {
      enter(bucket, late, to_launch, stream);
    }
    std::vector<CopyItem> items;
    for (const int param : std::exchange(zeros, {})) {
      items.push_back(zeros_of(bucket, round, part_of(param, static_cast<int>(&bucket - buckets_.data()))));
    }
    const auto first = std::stable_partition(round.held.begin(), round.held.end(),
                                             [&](const Item& item) { return !are_same(item.gradient.stream, stream); });
    bool reads = late;
    std::vector<std::shared_ptr<void>> owners;
    for (auto item = first; item != round.held.end(); ++item) {
      items.push_back(item_of(bucket, round, *item));
      reads = reads || item->add;
      held_bytes_ -= item->held_bytes();
      owners.push_back(std::move(item->gradient.owner));
    }
    round.held.erase(first, round.held.end());
    write(round, stream, items, reads);
    if (!owners.empty() && is_posing() &&
        !is_captured_) {  // the memory of tensors that pose is freed at once, not in the stream's order
      stream->run([owners = std::move(owners)] {});
    }
  }
}

void Window::pack_held() {
  for (Bucket& bucket : buckets_) {
    pack(bucket, false, false, {});
    pack(bucket, true, false, {});
  }
}

// ---- launches

void Window::launch_all(const std::vector<LaunchAction>& actions, const StreamRef& stream) {
  for (const LaunchAction& action : actions) {
    launch(action, stream);
  }
}

// The bucket's reduce-scatter adds to the shard or replaces what it holds. `stream` is used where nothing has arrived.
void Window::launch(const LaunchAction& action, const StreamRef& stream) {
  Bucket& bucket = buckets_[static_cast<size_t>(action.bucket)];
  Round& round = bucket.rounds[action.late];
  BW_EXPECTS(round.phase != Phase::kLaunched, "bucket " + std::to_string(action.bucket) + " is launched twice");
  const std::span<const int> absent = action.late ? std::span<const int>() : std::span<const int>(action.absent);
  if (!round.held.empty() || round.memory) {
    pack(bucket, action.late, true, absent);
  } else {
    enter(bucket, action.late, true, stream);
    const CopyItem zeros{round.memory.data, nullptr, bucket.spec.numel, bucket.spec.dtype, bucket.spec.dtype, false};
    if (!action.late) {
      write(round, stream, {&zeros, 1}, false);
    }
  }
  if (options_.is_registered && round.memory.place == nullptr) {
    bring_in(bucket, round);
  }
  if (!action.late) {
    launched_ = action.bucket + 1;
  }
  bucket.spec.sink->start(action.late || bucket.accumulates);
  IssueOptions options;
  if (stream != nullptr) {
    options.caller = round.streams.front();
    for (size_t i = 1; i < round.streams.size(); ++i) {
      options.after.push_back(round.streams[i]->record());
    }
    if (!are_same(options.caller, prepared_in_)) {  // the shards' last reader is behind it
      prepared_ = prepared_ == nullptr ? prepared_in_->record() : prepared_;
      options.after.push_back(prepared_);
    }
  }
  if (observer != nullptr) {
    const Arena::Place* const place = round.memory.place;
    observer(action.bucket, action.late, place == nullptr ? -1 : static_cast<int64_t>(place->planned->offset_bytes));
  }
  const View full{round.memory.data, bucket.spec.numel, bucket.spec.dtype};
  round.phase = action.late ? Phase::kEmpty : Phase::kLaunched;
  round.streams.clear();
  reductions_.issue(action.bucket, std::exchange(round.memory, {}), full, std::move(options));
}

// Copies a bucket that was packed on the side into its place.
void Window::bring_in(Bucket& bucket, Round& round) {
  const int number = static_cast<int>(&bucket - buckets_.data());
  const StreamRef stream = round.streams.front();
  Turn side = std::exchange(round.memory, {});
  reductions_.make_room(number);
  BW_EXPECTS(places_.is_free(number), "the place of bucket " + std::to_string(number) + " is in use");
  std::vector<EventRef> events;
  round.memory = places_.enter(number, &events);
  for (const EventRef& event : events) {
    stream->wait(event);
  }
  const CopyItem copy{round.memory.data, side.data, bucket.spec.numel, bucket.spec.dtype, bucket.spec.dtype, false};
  write(round, stream, {&copy, 1}, true);
  places_.leave(side, stream->record());
}

void Window::flush(std::string_view held, const StreamRef& stream) {
  const Flags flags{reinterpret_cast<const uint8_t*>(held.data()), held.size()};
  for (const StoreAction& drop : schedule_.drops(flags)) {
    Bucket& bucket = buckets_[static_cast<size_t>(drop.bucket)];
    Round& round = bucket.rounds[true];
    const BucketPart& part = part_of(drop.param, drop.bucket);
    pack(bucket, true, false, {});
    if (round.memory) {
      const CopyItem zeros = zeros_of(bucket, round, part);
      write(round, stream, {&zeros, 1}, true);
    }
  }
  launch_all(schedule_.flush(), stream);
}

bool Window::close(const WindowVerdict& agreed, bool with_late, const StreamRef& stream) {
  std::vector<LaunchAction> first, late;
  schedule_.close(agreed, &first, &late);
  if (!agreed.is_dirty) {
    return false;
  }
  reductions_.begin_close();
  launch_all(first, stream);
  reductions_.wait(stream);
  table_->mark_reduced();
  if (with_late) {
    for (const int param : agreed.voided) {
      table_->zero(param, stream.get());
    }
    prepared_in_ = stream;
    prepared_ = nullptr;
    launch_all(late, stream);
    reductions_.wait(stream);
  }
  if (is_captured_) {  // `stream` is behind all of it
    reductions_.forget_captured();
    places_.forget();
  }
  reductions_.end_window(agreed.is_complete || !options_.overlap);
  is_open_ = is_captured_ = false;
  return with_late && !late.empty();
}

void Window::drop_held(Round& round) {
  for (const Item& item : round.held) {
    held_bytes_ -= item.held_bytes();
  }
  round.held.clear();
}

void Window::drop_memory(Round& round) {
  drop_held(round);
  EventRef last;
  for (size_t i = 1; round.memory && i < round.streams.size(); ++i) {
    round.streams[0]->wait(round.streams[i]->record());
  }
  if (round.memory && !round.streams.empty()) {
    last = round.streams[0]->record();
  }
  places_.leave(round.memory, std::move(last));
  round.streams.clear();
  round.phase = Phase::kEmpty;
}

void Window::discard() {
  schedule_.discard();
  for (Bucket& bucket : buckets_) {
    drop_held(bucket.rounds[false]);
    drop_memory(bucket.rounds[true]);
  }
}

void Window::forget_captured() {
  if (!is_open_) {
    return;
  }
  schedule_.forget_window();
  reductions_.forget_captured();
  for (Bucket& bucket : buckets_) {
    for (Round& round : bucket.rounds) {
      round.streams.clear();
      drop_memory(round);
    }
  }
  places_.forget();
  is_open_ = is_captured_ = false;
}

void Window::release(const StreamRef& stream) {
  for (Bucket& bucket : buckets_) {
    drop_memory(bucket.rounds[false]);
    drop_memory(bucket.rounds[true]);
  }
  reductions_.release(stream);
  places_.release(stream);
}

}  // namespace bucketwheel
