// A Wire between the ranks of a test that are threads.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "check.h"
#include "comm/c10d/wire.h"

namespace bucketwheel {

// Between the ranks of a test: what is sent is read where it is when it is received, as late as a transfer may. Who settles
// what has not been received yet is told.
class PostOffice {
 public:
  struct Letter {
    const Wire::Message* sent;  // nothing: withdrawn
    size_t number;              // between its two ranks
    bool is_taken = false;
    std::optional<std::vector<std::byte>> left;  // by a transfer that is gone
  };

  std::shared_ptr<Letter> send(int from, const Wire::Message& message) {
    std::lock_guard lock(mutex_);
    sent_bytes += message.size_bytes;
    auto letter = std::make_shared<Letter>(Letter{&message, sent_[{from, message.peer}]++, false, {}});
    on_the_way_[{from, message.peer}].push_back(letter);
    changed_.notify_all();
    return letter;
  }
  void expect_taken(const Letter& letter) {
    std::lock_guard lock(mutex_);
    expect_whole(letter.sent->peer);
    CHECK(letter.is_taken);
  }
  void receive(int to, const Wire::Message& message) {
    std::unique_lock lock(mutex_);
    auto& letters = on_the_way_[{message.peer, to}];
    const auto has_come = [&] { return !letters.empty() && (letters.front()->sent || letters.front()->left); };
    changed_.wait(lock, [&] { return has_come() || is_broken_; });
    expect_whole(message.peer);
    Letter& letter = *letters.front();
    const std::vector<std::byte> data = letter.left ? *letter.left : contents(*letter.sent);
    CHECK(data.size() == message.size_bytes);
    std::copy(data.begin(), data.end(), message.data);
    letter.is_taken = true;
    letters.pop_front();
    changed_.notify_all();
  }
  void start_to_receive(int to, const Wire::Message& message) {
    std::lock_guard lock(mutex_);
    ++started_[{message.peer, to}];
  }
  // It arrives all the same if the peer has started to receive it.
  void withdraw(int from, Letter& letter) {
    std::lock_guard lock(mutex_);
    if (letter.number < started_[{from, letter.sent->peer}]) {
      letter.left = contents(*letter.sent);
    }
    letter.sent = nullptr;
  }
  void break_all() {
    std::lock_guard lock(mutex_);
    is_broken_ = true;
    changed_.notify_all();
  }

  size_t sent_bytes = 0;

 private:
  void expect_whole(int peer) const {
    if (is_broken_) {
      throw WireBroken{peer, "cut"};
    }
  }

  static std::vector<std::byte> contents(const Wire::Message& message) {
    return {message.data, message.data + message.size_bytes};
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<int, int>, size_t> sent_;
  std::map<std::pair<int, int>, size_t> started_;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Letter>>> on_the_way_;
  bool is_broken_ = false;
};

class ThreadWire final : public Wire {
 public:
  ThreadWire(std::shared_ptr<PostOffice> office, int rank) : office_(std::move(office)), rank_(rank) {}

  std::unique_ptr<Transfer> start(std::span<const Message> messages) override {
    auto transfer = std::make_unique<ThreadTransfer>(*office_, rank_);
    transfer->messages.assign(messages.begin(), messages.end());
    for (const Message& message : transfer->messages) {
      if (message.is_sent) {
        transfer->letters.push_back(office_->send(rank_, message));
      } else {
        office_->start_to_receive(rank_, message);
      }
    }
    return transfer;
  }

 private:
  struct ThreadTransfer final : Transfer {
    ThreadTransfer(PostOffice& office, int rank) : office(office), rank(rank) {}
    ~ThreadTransfer() override {
      for (const auto& letter : letters) {
        office.withdraw(rank, *letter);
      }
    }
    void receive() override {
      for (const Message& message : messages) {
        if (!message.is_sent) {
          office.receive(rank, message);
        }
      }
    }
    void settle() override {
      for (const auto& letter : letters) {
        office.expect_taken(*letter);
      }
    }
    PostOffice& office;
    const int rank;
    std::vector<Message> messages;
    std::vector<std::shared_ptr<PostOffice::Letter>> letters;
  };

  const std::shared_ptr<PostOffice> office_;
  const int rank_;
};

}  // namespace bucketwheel
