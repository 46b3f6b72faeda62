// A ProcessGroup between the ranks of a test that are threads.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "comm/c10d/process_group.h"

namespace bucketwheel {

// What is on its way between the ranks of a test.
class Switchboard {
 public:
  void break_all() {
    std::lock_guard lock(mutex);
    is_broken = true;
    changed.notify_all();
  }

  std::mutex mutex;  // of all
  std::condition_variable changed;
  std::map<std::tuple<size_t, int, int>, std::span<const std::byte>> messages;  // number of the all_to_all, from, to
  size_t sent_bytes = 0;
  bool is_broken = false;
};

struct RoomMemory {
  static constexpr size_t kBytes = size_t{1} << 20;
  std::array<std::vector<std::byte>, ProcessGroup::kRooms> sent;
  std::array<std::vector<std::byte>, ProcessGroup::kRooms> received;
  std::array<ProcessGroup::Room, ProcessGroup::kRooms> rooms() {
    std::array<ProcessGroup::Room, ProcessGroup::kRooms> rooms{};
    for (size_t i = 0; i < rooms.size(); ++i) {
      sent.at(i).resize(kBytes);
      received.at(i).resize(kBytes);
      rooms.at(i) = {sent.at(i).data(), received.at(i).data()};
    }
    return rooms;
  }
};

// What is sent is read as late as may be: when the receiver waits for it.
class ThreadGroup final : private RoomMemory, public ProcessGroup {
 public:
  ThreadGroup(std::shared_ptr<Switchboard> board, int rank)
      : ProcessGroup(RoomMemory::rooms(), kBytes), board_(std::move(board)), rank_(rank) {}

  void start(const AllToAll& what) override {
    std::lock_guard lock(board_->mutex);
    Call call{calls_started_++, this->room(what.room).received + what.into, what.received, what.owner,
              std::vector<bool>(what.received.size())};
    CHECK(what.into + std::accumulate(what.received.begin(), what.received.end(), size_t{0}) <= room_bytes());
    const std::byte* data = what.from != nullptr ? what.from : this->room(what.room).sent;
    CHECK(what.from == nullptr || what.owner != nullptr);
    for (int to = 0; to < static_cast<int>(what.sent.size()); ++to) {
      const size_t bytes = what.sent[static_cast<size_t>(to)];
      if (bytes != 0) {
        board_->messages[{call.number, rank_, to}] = {data, bytes};
      }
      data += bytes;
      board_->sent_bytes += bytes;
    }
    calls_.at(what.room).push_back(std::move(call));
    board_->changed.notify_all();
  }

  bool wait(size_t room) override {
    std::unique_lock lock(board_->mutex);
    std::vector<Call>& calls = calls_.at(room);
    const bool are_over = board_->changed.wait_for(lock, std::chrono::milliseconds(20), [&] {
      if (board_->is_broken) {
        throw AllToAllFailed{"cut"};
      }
      bool have_all = true;
      for (Call& call : calls) {
        have_all = receive(call) && is_received(call) && have_all;
      }
      return have_all;
    });
    if (are_over) {
      calls.clear();
    }
    return are_over;
  }

  void abandon() noexcept override { board_->break_all(); }

 private:
  struct Call {
    size_t number;
    std::byte* into;
    std::vector<size_t> received;  // bytes by rank
    std::shared_ptr<void> owner;   // of what is sent
    std::vector<bool> has_come;    // by rank
  };

  bool receive(Call& call) {
    bool has_all = true;
    std::byte* into = call.into;
    for (size_t from = 0; from < call.received.size(); ++from) {
      const size_t bytes = call.received[from];
      const auto message = board_->messages.find({call.number, static_cast<int>(from), rank_});
      if (message != board_->messages.end()) {
        CHECK(message->second.size() == bytes);
        std::ranges::copy(message->second, into);
        board_->messages.erase(message);
        board_->changed.notify_all();
        call.has_come[from] = true;
      }
      has_all &= bytes == 0 || call.has_come[from];
      into += bytes;
    }
    return has_all;
  }
  bool is_received(const Call& call) const {
    return std::ranges::none_of(board_->messages, [&](const auto& message) {
      return std::get<0>(message.first) == call.number && std::get<1>(message.first) == rank_;
    });
  }

  const std::shared_ptr<Switchboard> board_;
  const int rank_;
  size_t calls_started_ = 0;
  std::array<std::vector<Call>, kRooms> calls_;  // not over
};

}  // namespace bucketwheel
