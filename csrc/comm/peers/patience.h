// Patience: how long native code waits for other ranks beside the time limit of an operation. That of the making, and
// of what Python does, is in python/bucketwheel/comm/patience.py.
#pragma once

#include <chrono>

namespace bucketwheel {

struct Patience {
  // An operation that has been running for so long makes a peer that is dead, or has left, a failure. Shorter, and a peer
  // that has finished first and gone would look like one. It is also the time in which another rank, by the Store, may
  // tell why a neighbour has died.
  std::chrono::milliseconds peer{800};
  // For all ranks to read what one has failed with before its process goes, and the Store with it.
  std::chrono::milliseconds read{250};
  // Until all ranks have told how far they have come; who has not is taken for one that does not answer.
  std::chrono::milliseconds answer{3000};
  // Of a rank that leaves, for the others to take notice; and of one whose data stopped coming, to hear why.
  std::chrono::milliseconds goodbye{2000};
  // Of an operation that waits, for a Store that nobody can reach any more: with it went the process that had it.
  std::chrono::milliseconds store{5000};
  // Of a destructor, for operations in flight.
  std::chrono::milliseconds destructor{5000};
};
inline constexpr Patience kPatience;

}  // namespace bucketwheel
