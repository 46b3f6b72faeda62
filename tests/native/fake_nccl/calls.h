// What the functions of the fake begin with.
#pragma once

#include <string>

#include "comm.h"
#include "script.h"

namespace fake_nccl {

// `enter`, for a call of a communicator: kNcclInvalidArgument unless that is alive before and after the call was held.
inline int enter_with(const char* function, bucketwheel::NcclCommRef handle, CommPtr* comm) {
  const uint64_t removed = removed_comms();
  *comm = find_comm(handle);
  if (const int error = enter(function, [&] { return *comm == nullptr || (*comm)->is_aborted; })) {
    return error;
  }
  if (*comm == nullptr || (removed_comms() != removed && find_comm(handle) == nullptr)) {
    return fail(bucketwheel::kNcclInvalidArgument, std::string(function) + ": the communicator is not alive");
  }
  return bucketwheel::kNcclSuccess;
}

bool is_in_group();  // the calling thread

// A collective call of the host: all ranks come with their notice, of which the first value says what they call.
// False: aborted, or the ranks call different things; `error` then says which.
bool meet(Comm& comm, const char* function, const Notice& own, int* error);

void drop_windows(bucketwheel::NcclCommRef comm);

}  // namespace fake_nccl
