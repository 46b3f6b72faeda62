// Tie: two communicators of this rank, with different peers, that fail together.
#pragma once

#include <cstdint>
#include <memory>

#include "base/fork.h"
#include "comm/comm.h"
#include "comm/peers/watchdog.h"

namespace bucketwheel {

// [Note: failing together]
// A rank that waits in one communicator does not look at the other, and the peer that it waits for may be waiting for a
// third rank, which has failed in a communicator that this peer is not in. So the watchdog looks: where one of the two
// has failed, or a peer in it has, the other fails within about 0.2 s, whatever this rank's threads are waiting for, and
// its peers hear of it. Of a failure that a peer has told, the other one's is a PeerError; of this rank's own, it is
// what abort() makes.
class Tie {
 public:
  // While it lives it holds both.
  Tie(CommRef one, CommRef other);
  // Looks for the last time: a failure before it is passed on. Waits while the watchdog looks, which needs no GIL;
  // communicators that nobody else holds end here, not in the watchdog.
  ~Tie();
  Tie(const Tie&) = delete;
  Tie& operator=(const Tie&) = delete;

  // What the watchdog does, now. Thread-safe.
  void look() const;

 private:
  const MadeIn process_;
  const CommRef one_;
  const CommRef other_;
  std::shared_ptr<Watch> watch_;
};

}  // namespace bucketwheel
