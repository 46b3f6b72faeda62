#include "fibers.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/platform.h"
#include "stack_switch.h"
#include "warp.h"

namespace fake_cuda {
namespace {

std::atomic<uint64_t> seed_of_grids{0};
constinit thread_local uint64_t first_block = 0;
constinit thread_local uint64_t last_block = UINT64_MAX;

// Ends a thread of the kernel after a fault.
struct Abort {};

constexpr size_t kMaxSharedBytes = 48 * 1024;

struct Shuffler {  // splitmix64
  uint64_t state;
  uint64_t below(uint64_t bound) {
    state += 0x9e3779b97f4a7c15u;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (z ^ (z >> 31)) % bound;
  }
};

struct Shared {
  const void* site;
  size_t size_bytes;
  std::align_val_t alignment;
  void* data;
};

// Runs blocks on the calling thread of the host.
class Blocks {
 public:
  ~Blocks() { free_shared(); }

  void run(dim3 grid, dim3 block, const std::function<void()>& body, uint64_t seed);

  void sync(Place place);
  uint64_t exchange(unsigned mask, uint64_t value, int from, Place place);
  void* shared(const void* site, size_t size_bytes, size_t alignment);
  int lane() const { return static_cast<int>(running_ % 32); }

 private:
  struct Thread {
    Stack* stack = nullptr;  // null: not started, or ended
  };

  void run_block(uint64_t index, dim3 grid, dim3 block);
  static void threads_on_this_stack();
  void run_thread();
  void ended();
  [[noreturn]] void fault(const std::string& message);
  size_t pick();
  void all_are_ready();
  void wait();
  void enter(size_t thread);
  void become(size_t thread);
  Stack* idle_stack();
  void abandon_stacks();
  void free_shared();
  std::string who() const;

  const std::function<void()>* body_ = nullptr;
  Shuffler shuffler_{0};
  uint64_t seed_ = 0;
  bool shuffles_ = false;
  // Shuffled blocks take turns: any thread that is ready goes on, which looks into the corners of a warp; or the one
  // that became ready last, so that a warp runs as far as it can while others have not moved, which looks for missing
  // barriers.
  bool lets_warps_run_ahead_ = false;

  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<size_t> ready_;  // from next_ready_ on
  size_t next_ready_ = 0;
  size_t running_ = 0;
  size_t ended_ = 0;
  size_t at_barrier_ = 0;
  Place barrier_;
  std::string fault_;
  dim3 block_;

  Stack host_;
  std::vector<std::unique_ptr<Stack>> stacks_;
  std::vector<Stack*> idle_;
  std::vector<Shared> shared_;
};

Blocks& blocks() {
  thread_local Blocks all;
  return all;
}

std::string Blocks::who() const {
  return "block (" + std::to_string(blockIdx.x) + "," + std::to_string(blockIdx.y) + "," + std::to_string(blockIdx.z) +
         ") thread " + std::to_string(running_) + ": ";
}

void Blocks::fault(const std::string& message) {
  if (fault_.empty()) {
    fault_ = who() + message;
  }
  throw Abort();
}

// The next thread to go on. Precondition: one is ready.
size_t Blocks::pick() {
  if (!shuffles_) {
    if (next_ready_ > 4096) {
      ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(next_ready_));
      next_ready_ = 0;
    }
    return ready_[next_ready_++];
  }
  if (!lets_warps_run_ahead_) {
    std::swap(ready_[shuffler_.below(ready_.size())], ready_.back());
  }
  const size_t thread = ready_.back();
  ready_.pop_back();
  return thread;
}

void Blocks::all_are_ready() {
  ready_.clear();
  next_ready_ = 0;
  for (size_t thread = 0; thread < threads_.size(); ++thread) {
    ready_.push_back(thread);
  }
  if (lets_warps_run_ahead_) {
    const size_t first = shuffler_.below(warps_.size()) * 32;
    std::rotate(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(first), ready_.end());
  }
}

void Blocks::become(size_t thread) {
  running_ = thread;
  const auto index = static_cast<unsigned>(thread);
  threadIdx = {index % block_.x, index / block_.x % block_.y, index / block_.x / block_.y};
}

Stack* Blocks::idle_stack() {
  if (idle_.empty()) {
    stacks_.push_back(std::make_unique<Stack>(&Blocks::threads_on_this_stack));
    return stacks_.back().get();
  }
  Stack* stack = idle_.back();
  idle_.pop_back();
  return stack;
}

// Goes on with `thread` where it stands, or on a stack without a thread from its start.
void Blocks::enter(size_t thread) {
  Stack* from = Stack::current();
  become(thread);
  Stack* to = threads_[thread].stack;
  if (to == nullptr) {
    to = threads_[thread].stack = idle_stack();
  }
  if (to != from) {
    to->enter();
  }
}

// The running thread waits until somebody makes it ready.
void Blocks::wait() {
  const size_t self = running_;
  if (next_ready_ == ready_.size()) {
    fault("deadlock: " + std::to_string(at_barrier_) + " threads wait at __syncthreads" +
          (at_barrier_ != 0 ? " (" + barrier_.text() + ")" : "") + ", others at shuffles, or nobody is left");
  }
  enter(pick());
  become(self);
}

void Blocks::sync(Place place) {
  if (ended_ != 0) {
    fault("__syncthreads at " + place.text() + " after " + std::to_string(ended_) + " threads of the block have ended");
  }
  if (at_barrier_ != 0 && !(barrier_ == place)) {
    fault("divergent __syncthreads: at " + place.text() + ", others at " + barrier_.text());
  }
  barrier_ = place;
  if (++at_barrier_ == threads_.size()) {
    at_barrier_ = 0;
    all_are_ready();
  }
  wait();
}

uint64_t Blocks::exchange(unsigned mask, uint64_t value, int from, Place place) {
  Warp& warp = warps_[running_ / 32];
  const unsigned bit = 1u << lane();
  if ((mask & bit) == 0) {
    fault("shuffle at " + place.text() + ": its mask does not name the thread itself");
  }
  if ((mask & warp.exited) != 0) {
    fault("shuffle at " + place.text() + ": its mask names threads that have ended, or that the block does not have");
  }
  if (from < 0 || from >= 32 || ((mask >> from) & 1u) == 0) {
    fault("shuffle at " + place.text() + ": reads lane " + std::to_string(from) + ", which is not in its mask");
  }
  const size_t index = warp.exchange(mask);
  Exchange& exchange = warp.exchanges[index];
  if (exchange.arrived != 0 && !(exchange.place == place)) {
    fault("divergent shuffles in a warp: at " + place.text() + ", others at " + exchange.place.text());
  }
  const int turn = exchange.turn;
  exchange.values[turn][lane()] = value;
  exchange.place = place;
  exchange.arrived |= bit;
  if (exchange.arrived == mask) {
    exchange.arrived = 0;
    exchange.turn ^= 1;
    for (size_t other = 0; other < 32; ++other) {
      if (((mask >> other) & 1u) != 0) {
        ready_.push_back(running_ / 32 * 32 + other);
      }
    }
  }
  wait();
  return warp.exchanges[index].values[turn][from];
}

void* Blocks::shared(const void* site, size_t size_bytes, size_t alignment) {
  size_t total = size_bytes;
  for (const Shared& memory : shared_) {
    if (memory.site == site) {
      return memory.data;
    }
    total += memory.size_bytes;
  }
  if (total > kMaxSharedBytes) {
    fault(std::to_string(total) + " bytes of static shared memory");
  }
  const auto aligned = static_cast<std::align_val_t>(alignment);
  void* data = ::operator new(size_bytes, aligned);
  std::memset(data, 0xff, size_bytes);  // NaN
  shared_.push_back({site, size_bytes, aligned, data});
  return data;
}

void Blocks::free_shared() {
  for (const Shared& memory : shared_) {
    ::operator delete(memory.data, memory.alignment);
  }
  shared_.clear();
}

void Blocks::ended() {
  Warp& warp = warps_[running_ / 32];
  threads_[running_].stack = nullptr;
  warp.exited |= 1u << lane();
  ++ended_;
  if (at_barrier_ != 0) {
    fault("ends while " + std::to_string(at_barrier_) + " threads wait at __syncthreads (" + barrier_.text() + ")");
  }
  for (const Exchange& exchange : warp.exchanges) {
    if (exchange.arrived != 0 && ((exchange.mask >> lane()) & 1u) != 0) {
      fault("ends, but a shuffle names it (" + exchange.place.text() + ")");
    }
  }
}

void Blocks::run_thread() {
  try {
    try {
      (*body_)();  // NOLINT(clang-analyzer-core.CallAndMessage): stacks begin in a block, which has one
    } catch (const std::exception& error) {
      fault(error.what());
    }
    ended();
  } catch (const Abort&) {  // its block has failed: the thread only ends
  }
}

// Where every stack begins. A thread that ends leaves its stack to the next one that has none: no switch between them.
void Blocks::threads_on_this_stack() {
  Blocks& all = blocks();
  Stack* const self = Stack::current();
  for (;;) {
    all.run_thread();
    const bool is_over = !all.fault_.empty() || all.ended_ == all.threads_.size();
    if (!is_over && all.next_ready_ == all.ready_.size()) {
      all.fault_ = all.who() + "ends, and all others wait for ever";
    }
    all.idle_.push_back(self);
    if (!all.fault_.empty() || is_over) {
      all.host_.enter();
    } else {
      all.enter(all.pick());
    }
  }
}

void Blocks::abandon_stacks() {
  std::vector<std::unique_ptr<Stack>> kept;
  for (std::unique_ptr<Stack>& stack : stacks_) {
    for (const Stack* idle : idle_) {
      if (idle == stack.get()) {
        kept.push_back(std::move(stack));
        break;
      }
    }
  }
  stacks_ = std::move(kept);
}

void Blocks::run_block(uint64_t index, dim3 grid, dim3 block) {
  blockIdx = {static_cast<unsigned>(index % grid.x), static_cast<unsigned>(index / grid.x % grid.y),
              static_cast<unsigned>(index / grid.x / grid.y)};
  block_ = block;
  const size_t count = size_t{block.x} * block.y * block.z;
  threads_.assign(count, Thread());
  warps_.resize((count + 31) / 32);
  for (Warp& warp : warps_) {
    warp.exited = 0xffffffffu;
    warp.exchanges.clear();
  }
  for (size_t thread = 0; thread < count; ++thread) {
    warps_[thread / 32].exited &= ~(1u << (thread % 32));
  }
  lets_warps_run_ahead_ = shuffles_ && (index + seed_) % 2 == 0;
  all_are_ready();
  ended_ = 0;
  at_barrier_ = 0;
  enter(pick());
  free_shared();
}

void Blocks::run(dim3 grid, dim3 block, const std::function<void()>& body, uint64_t seed) {
  body_ = &body;
  seed_ = seed;
  shuffles_ = seed != 0;
  shuffler_ = Shuffler{seed};
  gridDim = grid;
  blockDim = block;
  host_.adopt_host();
  const uint64_t count = uint64_t{grid.x} * grid.y * grid.z;
  const uint64_t end = count < last_block ? count : last_block;
  std::vector<uint64_t> order;
  for (uint64_t index = first_block; index < end; ++index) {
    order.push_back(index);
  }
  for (size_t i = order.size(); shuffles_ && i > 1; --i) {
    std::swap(order[i - 1], order[shuffler_.below(i)]);
  }
  for (const uint64_t index : order) {
    run_block(index, grid, block);
    if (!fault_.empty()) {
      abandon_stacks();
      throw Fault(std::exchange(fault_, std::string()));
    }
  }
}

}  // namespace

void run_grid(dim3 grid, dim3 block, size_t /*shared*/, const std::function<void()>& body) {
  bucketwheel::IeeeFloats ieee;  // what this thread does with denormals is no matter of the device
  blocks().run(grid, block, body, seed_of_grids.load(std::memory_order_relaxed));
}

void set_seed(uint64_t seed) { seed_of_grids.store(seed, std::memory_order_relaxed); }

OnlyBlocks::OnlyBlocks(uint64_t first, uint64_t last) {
  first_block = first;
  last_block = last;
}
OnlyBlocks::~OnlyBlocks() {
  first_block = 0;
  last_block = UINT64_MAX;
}

int lane() { return blocks().lane(); }
void sync_block(std::source_location where) { blocks().sync(Place(where)); }
uint64_t exchange(unsigned mask, uint64_t value, int from, std::source_location where) {
  return blocks().exchange(mask, value, from, Place(where));
}
void* shared_memory(const void* site, size_t size_bytes, size_t alignment) {
  return blocks().shared(site, size_bytes, alignment);
}

}  // namespace fake_cuda
