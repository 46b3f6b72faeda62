// Threads that are left when the process ends.
#pragma once

namespace bucketwheel {

// [Note: threads at exit] Until Python 3.13 a thread that asks for the GIL once the interpreter has gone is ended by
// pthread_exit(). In one that comes back from foreign C++ which had released the GIL (gloo, a Store) this unwinds
// through a destructor, and std::terminate() ends the process by SIGABRT, whatever its exit status was to be.

// From now on a thread that terminates without an exception sleeps, until the process has ended; not the calling one.
// For the end of the process.
void let_others_sleep_at_terminate() noexcept;

}  // namespace bucketwheel
