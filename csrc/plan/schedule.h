// Schedule: which gradient goes where and which bucket is reduced when. Pure: events in, actions out; of one rank.
//
// A *sync window* lasts from the first gradient until the gradients are asked for (`step`, `clip_grad_norm_`,
// `grad_sync`). In it every rank launches every bucket exactly once, in index order, whatever order its gradients
// arrive in:
//
// 1. During backward a bucket is launched when all gradients that are due in it have arrived and every bucket before
//    it has gone.
// 2. When the window closes what is left is launched, with zeros for what is missing (`flush`; peers that run another
//    graph may be waiting for it), and the ranks compare notes (`notes`, `agree`). A rank without gradients learns from
//    these that there is something to launch.
// 3. A gradient that came after its bucket had gone was kept in *late* memory. If any rank has late gradients of a
//    bucket, all ranks reduce that bucket once more: the *late round*.
//
// So the sequence of collectives depends on agreed facts alone. [Note: one sequence on every rank]
//
// What a rank waits for is agreed too: the parameters that any rank used in one of the last few windows. A parameter
// that nobody uses therefore holds nothing up, and one that returns goes through the late round once.
//
// A gradient that *replaces* one of the same window (`zero_grad()`, `p.grad = None` or a tensor assigned by hand, and
// then another backward) makes the first round void for its parameter, wherever its bucket is: the owner of the shard
// drops that sum and the replacement goes through the late round. Ranks must agree on replacing: some of them alone
// cannot.
//
// Gradients are scaled by a factor that is applied later (grads/reduced.py), so ranks agree on factors as well:
// [Note: whose factor].
//
// [Note: static graph] Where every window has the gradients of the first one, there is nothing to agree on: after the
// first window (in which every rank has some: a rank without any could not tell a window that others have begun) each
// rank knows what all the notes say, and waits for as many gradients of a parameter as there were then (a weight that
// is shared, or checkpointed reentrantly, gets several in one backward). `find_deviation` tells the parameter that
// breaks the promise.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace bucketwheel {

// Write (or add) the part of a parameter's gradient that lies in `bucket`. Late memory begins as zeros.
struct StoreAction {
  int param = 0;
  int bucket = 0;
  bool late = false;
  bool add = false;
  bool operator==(const StoreAction&) const = default;
};

// Reduce `bucket`. `absent`: its parameters that this rank has nothing for (zeros).
struct LaunchAction {
  int bucket = 0;
  std::vector<int> absent;
  bool late = false;
  bool operator==(const LaunchAction&) const = default;
};

// What follows from one event: first all of `stores`, then all of `launches`.
struct Actions {
  std::vector<StoreAction> stores;
  std::vector<LaunchAction> launches;
};

// What all ranks know when a window closes.
struct Agreement {
  bool is_dirty = false;          // some rank has new gradients
  bool is_dirty_on_all = false;   // every rank has
  bool is_complete = false;       // every rank had launched every bucket before the window was closed
  bool is_uneven = false;         // a parameter of `held` had no gradient on some rank, which could not list it
  std::vector<uint8_t> held;      // per parameter: has any rank a gradient
  std::vector<uint8_t> common;    // per parameter: has every rank one
  std::vector<int> voided;        // parameters whose first round is dropped
  std::vector<int> late;          // buckets with a late round
  std::vector<int> conflicts;     // parameters that some ranks replaced or dropped and others did not: an error
  std::vector<int> scaled_apart;  // parameters that ranks scaled differently: an error
  std::vector<double> factors;    // what each gradient is still to be multiplied by; empty: 1, all of them
  bool operator==(const Agreement&) const = default;
};

// One byte for each parameter; empty for none at all.
using Flags = std::span<const uint8_t>;

// Not thread-safe.
class Schedule {
 public:
  // `buckets_of[param]`: the buckets that hold the parameter, ascending.
  Schedule(std::vector<std::vector<int>> buckets_of, int bucket_count, bool is_static = false);

  int param_count() const { return static_cast<int>(buckets_of_.size()); }

  // A gradient of `param` has arrived, on top of what it has or, if it `replaces` that, instead of it. `launch` false
  // (inside `no_sync`): keep it, reduce nothing, and go on waiting for another one.
  Actions gradient(int param, bool replaces, bool launch);

  // Whether a gradient of `param` would be its first in this window and in time for every bucket, so that `gradient`
  // would only store it. `arrive` does the same in less time, and tells whether `ready` has something then.
  bool is_first(int param) const {
    return !stored_[param] && !void_[param] && first_bucket_[param] >= next_ && !is_deviation(param);
  }
  bool arrive(int param, bool launch);
  // The buckets that can go.
  std::vector<LaunchAction> ready();

  // Nothing more will come for `params` in this window: the buckets that can go now. None if this rank has no gradient
  // at all: others may have none either, and then nobody launches.
  std::vector<LaunchAction> complete(std::span<const int> params);

  // All that is left of the first round, if this rank has gradients: the window is about to be closed.
  std::vector<LaunchAction> flush();

  // All gradients were dropped (`zero_grad`): in an open window the first round is void for every parameter. The
  // caller drops its late memory.
  void discard();
  // The open window never was: it was captured in a CUDA graph that has not come to its end. On all ranks or on none.
  // The caller drops all memory of buckets.
  void forget_window() {
    deviating_ = -1;
    begin_window();
  }
  // Before `notes`: what must leave late memory, because p.grad was set to None after it arrived.
  std::vector<StoreAction> drops(Flags held) const;
  // Whether this rank has put a gradient of `param` into this window.
  bool has_stored(int param) const { return stored_[param]; }
  bool is_dirty() const { return is_dirty_; }
  int64_t window() const { return window_; }  // how many with gradients have been closed

  // This rank's part of the agreement. `held`: has the parameter a gradient now (p.grad is not None); one that arrived
  // and is held no longer (p.grad = None since) is void. `older`: does what earlier windows left of it still count.
  // `factors`: what its gradient is still to be multiplied by; empty for 1.
  std::vector<uint8_t> notes(Flags held, Flags older, std::span<const double> factors) const;
  // The facts that follow from all ranks' notes; the same on every rank. Error for notes of another layout.
  Agreement agree(std::span<const std::string_view> notes) const;

  // The launches that end the window; those of the late round come after them. Then a new window begins.
  void close(const Agreement& agreement, std::vector<LaunchAction>* first, std::vector<LaunchAction>* late);

  // [Note: static graph] Whether the first window has been closed, so that the others need no notes of other ranks.
  bool is_learnt() const { return is_static_ && is_learnt_; }
  // What `agree` would return if all ranks kept the promise; only once `is_learnt`.
  Agreement assume(Flags held, Flags older, std::span<const double> factors) const;
  // Whether the last gradient of `param` breaks it: the first window had none, or not as many, or it replaces another
  // one, which the other ranks would have to know.
  bool is_deviation(int param) const { return is_learnt() && (!static_own_[param] || deviating_ == param); }
  // As the window closes, or as it is asked for gradients that no window has brought: a parameter whose gradients are
  // not those of the first window, else -1.
  int find_deviation(Flags held) const;
  // Whether ranks without this gradient would have to be told of a factor for it, and cannot be: until the window
  // closes, unless they have an older one.
  bool is_private(int param) const { return is_learnt() && is_dirty_ && !static_common_[param]; }

 private:
  void begin_window();
  void count(int param);
  std::vector<LaunchAction> launches(bool all);
  void agree_on_flags(std::span<const std::string_view> notes, Agreement* agreement) const;
  void agree_on_factors(std::span<const std::string_view> notes, Agreement* agreement) const;

  std::vector<std::vector<int>> buckets_of_;
  std::vector<std::vector<int>> params_of_;
  std::vector<int> first_bucket_;  // of each parameter; past all of them without elements
  bool is_static_;
  bool is_learnt_ = false;
  std::vector<uint8_t> static_own_;     // what this rank had gradients of in the first window
  std::vector<uint8_t> static_held_;    // what any rank had
  std::vector<uint8_t> static_common_;  // what every rank had
  int deviating_ = -1;
  int64_t window_ = 0;
  std::vector<int64_t> last_held_;  // the window in which any rank used the parameter last
  std::vector<int> due_;            // how many gradients of it to wait for; 1 unless the graph is static
  // Of this window:
  std::vector<uint8_t> expected_;
  std::vector<int> missing_;  // of each bucket: how many parameters it waits for
  std::vector<int> arrived_;
  std::vector<uint8_t> stored_;
  std::vector<uint8_t> absent_;  // nothing in first-round memory
  std::vector<uint8_t> void_;
  std::vector<uint8_t> late_;     // buckets
  std::vector<uint8_t> is_late_;  // parameters: in late memory
  int next_ = 0;
  bool is_complete_ = false;  // `flush` had nothing to do
  bool is_dirty_ = false;
};

}  // namespace bucketwheel
