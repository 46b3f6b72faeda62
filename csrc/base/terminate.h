// Threads that are left when the process ends.
#pragma once

#include <pthread.h>

#include <vector>

namespace bucketwheel {

// [Note: threads at exit] Up to Python 3.13 a thread that asks for the GIL once the interpreter has gone is ended by
// pthread_exit(). In one that comes back from foreign C++ which had released the GIL (gloo, a Store) this unwinds
// through a destructor, and std::terminate() ends the process by SIGABRT, whatever its exit status was to be.

// From now on these threads sleep, until the process has ended, where they would terminate without an exception. The first call
// counts.
void let_sleep_at_terminate(std::vector<pthread_t> threads);

}  // namespace bucketwheel
