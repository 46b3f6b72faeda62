// ProcessGroup: a torch process group, of which one collective is used: all_to_all with a size for each pair of ranks.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>

namespace bucketwheel {

// What torch says of an all_to_all that has failed. Thrown inside comm/ only.
struct AllToAllFailed {
  std::string text;
};

// Called by one thread.
class ProcessGroup {
 public:
  // One all_to_all at a time in each: the next one travels while what the last one has brought is summed.
  static constexpr size_t kRooms = 2;
  // Memory of the group's own, which it keeps until nothing of an all_to_all that was given up writes there any more. What
  // is for, or from, each rank lies in rank order without gaps.
  struct Room {
    std::byte* sent;
    std::byte* received;
  };

  // `room_bytes`: of what is sent, and as many of what is received.
  ProcessGroup(const std::array<Room, kRooms>& rooms, size_t room_bytes) : rooms_(rooms), room_bytes_(room_bytes) {}
  virtual ~ProcessGroup() = default;
  const Room& room(size_t index) const { return rooms_[index]; }
  size_t room_bytes() const { return room_bytes_; }

  // Bytes by rank, none for the own one. Returns before the data has travelled. Throws AllToAllFailed.
  virtual void start(size_t room, std::span<const size_t> sent, std::span<const size_t> received) = 0;
  // Waits some milliseconds for the all_to_all in `room`; whether it is over. Throws AllToAllFailed.
  virtual bool wait(size_t room) = 0;
  // The communicator has failed: nothing is started or waited for any more. What is under way ends on all ranks.
  virtual void abandon() noexcept = 0;

 private:
  const std::array<Room, kRooms> rooms_;
  const size_t room_bytes_;
};

}  // namespace bucketwheel
