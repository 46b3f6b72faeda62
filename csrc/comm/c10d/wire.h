// Wire: how bytes travel between ranks that share no memory.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace bucketwheel {

// A connection broke, or was interrupted: whose, and what the transport says of it. Thrown inside comm/ only.
struct WireBroken {
  int peer;
  std::string text;
};

class Wire {
 public:
  struct Message {
    int peer;
    bool is_sent;  // else received
    std::byte* data;
    size_t size_bytes;  // both sides know it
  };
  // Messages on their way. What they read and write lives until settle() has returned, or the transfer is gone, which is
  // safe at any time: what was sent may be lost then, unless the peer has started to receive it, and something has come
  // that the peer has sent since.
  class Transfer {
   public:
    virtual ~Transfer() = default;
    // Blocks until what the peers send has come. Throws WireBroken.
    virtual void receive() = 0;
    // What was sent may be overwritten. Only once it is known that the peers have received it: of a peer that dies gloo may
    // lose what was sent, and would wait for ever. Throws WireBroken.
    virtual void settle() = 0;
  };

  virtual ~Wire() = default;
  // Never waits for a peer. Between two ranks, messages arrive in the order in which they were started; those that are
  // received are to be started first. Throws WireBroken.
  virtual std::unique_ptr<Transfer> start(std::span<const Message> messages) = 0;
};

}  // namespace bucketwheel
