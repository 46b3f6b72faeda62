// Telling a forked child from its parent.
//
// Threads do not survive fork() and a lock that another thread held stays locked in the child. Objects that own a
// thread or a lock remember the generation they were made in and refuse to work in a later one.
#pragma once

#include <cstdint>

namespace bucketwheel {

// The number of fork() calls between the process that loaded the library and this one. A single load.
// The first call installs the handler that counts: objects call it when they are made.
uint64_t fork_generation();

// True in a process that was made by fork() and has not called exec() since, whoever had loaded the library then;
// true also where the kernel does not say (no /proc).
bool is_forked_without_exec();

}  // namespace bucketwheel
