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
    EventRef done;                // null: enqueuing it failed, and what it uses is never known to be free
    std::shared_ptr<Fate> fate;
    std::vector<Handle::Keepalive> keepalive;
  };
  explicit Inflight(FlightRing& flight) : flight_(flight) {}

  void add(Item item);  // in the order of issue
  // What a graph replays: kept as long as the communicator.
  void add_captured(Item item);

  // Takes those that are over, in order, at most so many. Their owners are to be freed without locks.
  std::vector<Item> take_finished(size_t most = SIZE_MAX);
  struct Front {
    std::shared_ptr<const Operation> op;
    Clock::duration waited;
  };
  // The next one to end, and for how long it could have been running; nothing until it could start.
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
  bool has_given_up_ = false;
};

}  // namespace bucketwheel
