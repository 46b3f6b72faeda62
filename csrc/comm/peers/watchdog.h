// Watchdog: the thread of this process that looks after communicators nobody is asking about.
//
// About ten times a second it calls what was given to watch(): to notice peers that died and operations that are late,
// to free what finished operations kept alive, and to write the flight ring of a rank that has failed, or whose peer
// has. It never takes the GIL. It runs while something is watched.
#pragma once

#include <functional>
#include <memory>

namespace bucketwheel {

class Watch {
 public:
  virtual ~Watch() = default;
  // After this returns `look` is not called any more, and what it holds is freed. Not from inside `look`.
  virtual void stop() noexcept = 0;
};

// Has `look` called until stop() or until the Watch is gone, which waits while it looks. It must not throw, nor wait for
// long: others are looked after by the same thread. In a forked child nothing is called or freed.
std::shared_ptr<Watch> watch(std::function<void()> look);
// Has everything looked after now.
void wake_watchdog();

}  // namespace bucketwheel
