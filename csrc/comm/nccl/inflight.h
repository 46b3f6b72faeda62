// Inflight: the operations of one communicator that are in a stream and that the device may not have done. Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/flight.h"
#include "comm/handle.h"
#include "comm/operation.h"

namespace bucketwheel {

class Inflight {
 public:
  struct Item {
    std::shared_ptr<Operation> op;
    std::vector<EventRef> ready;  // what it starts after
    EventRef done;                // null: it is not known when what it uses is free
    std::shared_ptr<Outcome> outcome;
    std::vector<Handle::Keepalive> keepalive;
  };
  explicit Inflight(FlightRing& flight) : flight_(flight) {}

  // A thread is about to enqueue `op`, and may stay in there; until its item is added.
  void enter(std::shared_ptr<const Operation> op, Clock::time_point now);
  // In the order of issue. After give_up() it fails like the others.
  void add(Item item);
  // What a graph replays: kept as long as the communicator.
  void add_captured(Item item);

  // Takes those that are over, in order, at most so many. Their owners are to be freed without locks.
  std::vector<Item> take_finished(size_t most = SIZE_MAX);
  struct Front {
    std::shared_ptr<const Operation> op;
    Clock::duration waited;
  };
  // The next one to end, and for how long it could have been running; nothing until it could start. With nothing
  // running, the one that is being enqueued, and for how long.
  std::optional<Front> front();

  // Those that are not over fail with `error`. False when that has been done before.
  bool give_up(const std::exception_ptr& error);
  // Nothing is running, or all has been given up.
  bool is_settled() const;
  // After give_up(): until the device uses none of their memory. What it may still use at the deadline is never freed.
  void await_device(Deadline deadline) noexcept;

 private:
  struct Running {
    Item item;
    std::optional<Clock::time_point> since;
  };
  FlightRing& flight_;
  mutable std::mutex mutex_;
  std::deque<Running> running_;
  std::vector<Item> captured_;
  struct Entered {
    std::shared_ptr<const Operation> op;
    Clock::time_point since;
  };
  std::optional<Entered> entered_;
  std::exception_ptr given_up_with_;
};

}  // namespace bucketwheel
