// Schedule: which gradient goes where and which bucket is reduced when, on one rank. Pure: events in, actions out.
//
// A *sync window* lasts from the first gradient until the gradients are asked for (`step`, `clip_grad_norm_`,
// `grad_sync`). In it every rank launches every bucket exactly once, in index order, whatever order its gradients
// arrive in:
//
// 1. During backward a bucket is launched when all gradients that are due in it have arrived and every bucket before
// it
//    has been launched.
// 2. When the window closes, the remaining buckets are launched, with zeros for missing gradients (`flush`): peers
// that run
//    another graph may be waiting for them. Then the ranks exchange their notes (`notes`, `agree`), from which a rank
//    without gradients learns that there is something to launch.
// 3. A gradient that came after its bucket's launch was kept in *late* memory. If any rank has late gradients of a
// bucket,
//    all ranks reduce that bucket once more: the *late round*.
//
// So the sequence of collectives depends on agreed facts alone. [Note: one sequence on every rank]
//
// Which gradients are due is agreed too: those of parameters that any rank used in one of the last few windows. So a
// parameter that nobody uses delays nothing, and one that is used again goes through the late round once.
//
// A gradient *replaces* one of the same window after `zero_grad()`, `p.grad = None` or a tensor assigned by hand. The
// first round is then void for its parameter, wherever its bucket is: the owner of the shard drops that sum, and the
// replacement goes through the late round. All ranks must replace, or none: otherwise it is an error.
//
// Gradients are scaled by a factor that is applied later (grads/reduced.py), so ranks agree on factors too:
// [Note: whose factor].
//
// [Note: static graph] If every window has the gradients of the first one, there is nothing to agree on. After the
// first window, in which every rank must have some (without any it could not know that others have begun a window),
// each rank knows what all notes say. It waits for as many gradients of a parameter as the first window had: a weight
// that is shared, or checkpointed reentrantly, gets several in one backward. `find_deviation` finds a parameter that
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

// Reduce `bucket`. `absent`: its parameters for which this rank has no gradient (zeros).
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
struct WindowVerdict {
  bool is_dirty = false;          // some rank has new gradients
  bool is_dirty_on_all = false;   // every rank has
  bool is_complete = false;       // every rank had launched every bucket before the window was closed
  bool is_uneven = false;         // a parameter of `held` has no gradient on some rank
  std::vector<uint8_t> held;      // per parameter: has any rank a gradient
  std::vector<uint8_t> common;    // per parameter: has every rank one
  std::vector<int> voided;        // parameters whose first round is dropped
  std::vector<int> late;          // buckets with a late round
  std::vector<int> conflicts;     // parameters that some ranks replaced or dropped and others did not: an error
  std::vector<int> scaled_apart;  // parameters that ranks scaled differently: an error
  std::vector<double> factors;    // each gradient is still to be multiplied by this; empty: all are 1
  bool operator==(const WindowVerdict&) const = default;
};

// One byte for each parameter; empty for none at all.
using Flags = std::span<const uint8_t>;

// Not thread-safe.
class Schedule {
 public:
  // `buckets_of[param]`: the buckets that hold the parameter, ascending.
  Schedule(std::vector<std::vector<int>> buckets_of, int bucket_count, bool is_static = false);

  int param_count() const { return static_cast<int>(buckets_of_.size()); }

  // A gradient of `param` has arrived. It is added to the one before or, if it `replaces`, takes its place. `launch`
  // false (inside `no_sync`): keep it, reduce nothing, and wait for another one.
  Actions gradient(int param, bool replaces, bool launch);

  // Whether a gradient of `param` would be its first in this window and in time for every bucket, so that `gradient`
  // would only store it. Then `arrive` does the same faster; it says whether `ready` has something to launch.
  bool is_first(int param) const {
    return !stored_[param] && !void_[param] && first_bucket_[param] >= next_ && !is_deviation(param);
  }
  bool arrive(int param, bool launch);
  // The buckets that can be launched.
  std::vector<LaunchAction> ready();

  // `params` get no more gradients in this window: returns the buckets that can be launched now. None if this rank has
  // no gradient at all: perhaps no rank has, and then nobody launches.
  std::vector<LaunchAction> complete(std::span<const int> params);

  // The window is about to close: the remaining launches of the first round, if this rank has gradients.
  std::vector<LaunchAction> flush();

  // All gradients were dropped (`zero_grad`): in an open window the first round is void for every parameter. The
  // caller drops its late memory.
  void discard();
  // Forgets the open window: the capture of its CUDA graph did not end. On all ranks or on none. The caller drops all
  // memory of buckets.
  void forget_window() {
    deviating_ = -1;
    begin_window();
  }
  // Before `notes`: the parameters to drop from late memory, because p.grad was set to None after the gradient
  // arrived.
  std::vector<StoreAction> drops(Flags held) const;
  // Whether this rank has put a gradient of `param` into this window.
  bool has_stored(int param) const { return stored_[param]; }
  bool is_dirty() const { return is_dirty_; }
  int64_t window() const { return window_; }  // how many windows with gradients have been closed

  // This rank's part of the agreement, by parameter. `held`: it has a gradient now (p.grad is not None); one that
  // arrived and is not held (p.grad = None since) is void. `older`: its gradient of earlier windows still counts.
  // `factors`: its gradient is still to be multiplied by this; empty: all are 1.
  std::vector<uint8_t> notes(Flags held, Flags older, std::span<const double> factors) const;
  // The facts that follow from the notes of all ranks; the same on every rank. Error for notes of another layout.
  WindowVerdict agree(std::span<const std::string_view> notes) const;

  // The launches that end the window, those of the late round last. Then a new window begins.
  void close(const WindowVerdict& agreement, std::vector<LaunchAction>* first, std::vector<LaunchAction>* late);

  // [Note: static graph] Whether the first window has been closed, so that the others need no notes of other ranks.
  bool is_learnt() const { return is_static_ && is_learnt_; }
  // What `agree` would return if all ranks keep the promise. Only after `is_learnt`.
  WindowVerdict assume(Flags held, Flags older, std::span<const double> factors) const;
  // Whether the last gradient of `param` breaks the promise: the first window had none, or fewer, or it replaces
  // another one, which the other ranks would have to know.
  bool is_deviation(int param) const { return is_learnt() && (!static_own_[param] || deviating_ == param); }
  // When the window closes, or is asked for gradients that no window has brought: a parameter whose gradients differ
  // from those of the first window, else -1.
  int find_deviation(Flags held) const;
  // Whether ranks without this gradient need to know a factor for it but cannot be told: true until the window closes,
  // unless they have an older gradient of it.
  bool is_private(int param) const { return is_learnt() && is_dirty_ && !static_common_[param]; }

 private:
  void begin_window();
  void count(int param);
  std::vector<LaunchAction> launches(bool all);

  std::vector<std::vector<int>> buckets_of_;
  std::vector<std::vector<int>> params_of_;
  std::vector<int> first_bucket_;  // of each parameter; the number of buckets if it has no elements
  bool is_static_;
  bool is_learnt_ = false;
  std::vector<uint8_t> static_own_;     // parameters of which this rank had gradients in the first window
  std::vector<uint8_t> static_held_;    // of which any rank had
  std::vector<uint8_t> static_common_;  // of which every rank had
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
