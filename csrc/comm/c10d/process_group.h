// ProcessGroup: a torch process group, of which one collective is used: all_to_all with a size for each pair of ranks.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace bucketwheel {

// What torch says of an all_to_all that has failed. Thrown inside comm/ only.
struct AllToAllFailed {
  std::string text;
};

// Called by one thread.
class ProcessGroup {
 public:
  // One chunk at a time in each: the next one travels while what the last one has brought is summed.
  static constexpr size_t kRooms = 2;
  // Memory of the group's own, which it keeps until nothing of an all_to_all that was given up writes there any more.
  struct Room {
    std::byte* sent;
    std::byte* received;
  };

  // `room_bytes`: of what is sent, and as many of what is received.
  ProcessGroup(const std::array<Room, kRooms>& rooms, size_t room_bytes) : rooms_(rooms), room_bytes_(room_bytes) {}
  virtual ~ProcessGroup() = default;
  const Room& room(size_t index) const { return rooms_[index]; }
  size_t room_bytes() const { return room_bytes_; }

  struct AllToAll {
    size_t room = 0;
    // What is sent, by rank without gaps: this, which lives as long as `owner` does, or what `room` has to send.
    const std::byte* from = nullptr;
    std::shared_ptr<void> owner{};
    size_t into = 0;  // where in what `room` receives it comes, by rank without gaps
    // Bytes by rank, none for the own one.
    std::vector<size_t> sent{};
    std::vector<size_t> received{};
  };
  // Returns before the data has travelled. Throws AllToAllFailed.
  virtual void start(const AllToAll& what) = 0;
  // Waits some milliseconds for all that was started in `room`; whether it is over. Throws AllToAllFailed.
  virtual bool wait(size_t room) = 0;
  // The communicator has failed: nothing is started or waited for any more. What is under way ends on all ranks.
  virtual void abandon() noexcept = 0;

 private:
  const std::array<Room, kRooms> rooms_;
  const size_t room_bytes_;
};

}  // namespace bucketwheel
