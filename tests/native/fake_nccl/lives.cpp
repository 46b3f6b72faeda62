// Communicators are made, split, ended.
#include <algorithm>
#include <cstring>

#include "calls.h"
#include "fake_nccl.h"

using namespace bucketwheel;

namespace fake_nccl {
namespace {

enum Meeting : int64_t { kSplit = 1, kFinalize, kDestroy };

std::string wrong_with(const NcclConfig& config) {
  const auto is_set = [](int value) { return value != kNcclUndefined; };
  if (config.magic != NcclConfig().magic || config.size_bytes < sizeof(NcclConfig)) {
    return "the configuration was not initialised";
  }
  if (config.version < 22700) {
    return "the configuration is of an older version than the members that it has";
  }
  if (config.blocking != 1 || config.split_share != 0) {
    return "the fake's communicators are blocking ones, and share nothing";
  }
  if (is_set(config.max_ctas) && config.max_ctas <= 0) {
    return "maxCTAs is positive";
  }
  const int last_policy = version() >= 22800 ? kNcclCtaPolicyZero : kNcclCtaPolicyEfficiency;
  if (is_set(config.cta_policy) && (config.cta_policy < 0 || config.cta_policy > last_policy)) {
    return "this version has no such CTAPolicy";
  }
  return "";
}

// The end of every initialisation.
int make_comm(const std::string& name, int rank, int world, const NcclConfig& config, NcclCommRef* to) {
  note_config(config);
  auto comm = std::make_shared<Comm>();
  comm->rank = rank;
  comm->world = world;
  comm->name = name;
  comm->config = config;
  comm->queue = std::make_shared<Queue>();
  int error = 0;
  const auto is_stopped = [before = releases()] { return releases() != before; };
  comm->board = Board::join(name, rank, world, is_stopped, &error);
  if (comm->board == nullptr) {
    return error;
  }
  *to = add_comm(comm);
  return kNcclSuccess;
}

int refuse_group(const char* function) {
  return is_in_group() ? fail(kNcclInvalidUsage, std::string(function) + ": not in a group, for the fake") : 0;
}

int check_config(const char* function, const NcclConfig* config) {
  const std::string wrong = config == nullptr ? "" : wrong_with(*config);
  return wrong.empty() ? 0 : fail(kNcclInvalidArgument, std::string(function) + ": " + wrong);
}

// Ends the work in progress, and what waits for it.
void stop(Comm& comm, std::atomic<bool>& flag) {
  flag = true;
  wait_until([&] { return comm.running == 0; }, [] { return false; });
}

void end(NcclCommRef handle) {
  drop_windows(handle);
  remove_comm(handle);
}

}  // namespace

bool meet(Comm& comm, const char* function, const Notice& own, int* error) {
  comm.board->notice(Lane::kHost, comm.rank, 1) = own;
  if (!comm.board->meet(Lane::kHost, [&] { return comm.is_aborted.load(); })) {
    *error = fail(kNcclInternalError, std::string(function) + ": aborted");
    return false;
  }
  for (int rank = 0; rank < comm.world; ++rank) {
    if (comm.board->notice(Lane::kHost, rank, 0).values[0] != own.values[0]) {
      *error = fail(kNcclInvalidUsage, std::string(function) + ": rank " + std::to_string(rank) + " calls another one");
      return false;
    }
  }
  return true;
}

}  // namespace fake_nccl

namespace bucketwheel {

using namespace fake_nccl;

FAKE_EXPORT int ncclGetUniqueId(NcclUniqueId* id) {
  if (const int error = enter("ncclGetUniqueId")) {
    return error;
  }
  const std::string name = Board::new_name();
  if (id == nullptr || name.empty()) {
    return fail(kNcclInvalidArgument, "ncclGetUniqueId: id is null, or no folder for its file");
  }
  *id = {};
  name.copy(id->internal, name.size());
  return kNcclSuccess;
}

FAKE_EXPORT int ncclCommInitRankConfig(NcclCommRef* comm, int world, NcclUniqueId id, int rank, NcclConfig* config) {
  const Making making;
  if (const int error = enter("ncclCommInitRankConfig")) {
    return error;
  }
  if (const int error = refuse_group("ncclCommInitRankConfig")) {
    return error;
  }
  const std::string name(id.internal, strnlen(id.internal, sizeof id.internal));
  if (comm == nullptr || world < 1 || world > kMaxWorld || rank < 0 || rank >= world ||
      name.find("/fake_nccl-") == std::string::npos) {
    return fail(kNcclInvalidArgument, "ncclCommInitRankConfig: rank " + std::to_string(rank) + " of " +
                                          std::to_string(world) + ", no such id, or comm is null");
  }
  if (const int error = check_config("ncclCommInitRankConfig", config)) {
    return error;
  }
  return make_comm(name, rank, world, config == nullptr ? NcclConfig() : *config, comm);
}

FAKE_EXPORT int ncclCommSplit(NcclCommRef handle, int color, int key, NcclCommRef* child, NcclConfig* config) {
  const Making making;
  CommPtr comm;
  if (const int error = enter_with("ncclCommSplit", handle, &comm)) {
    return error;
  }
  if (const int error = comm->tell_error()) {
    return error;
  }
  if (const int error = refuse_group("ncclCommSplit")) {
    return error;
  }
  if (child == nullptr || color < kNcclSplitNoColor) {
    return fail(kNcclInvalidArgument, "ncclCommSplit: child is null, or color is " + std::to_string(color));
  }
  if (const int error = check_config("ncclCommSplit", config)) {
    return error;
  }
  int error = 0;
  if (!meet(*comm, "ncclCommSplit", {{kSplit, color, key}}, &error)) {
    return error;
  }
  const std::string name = comm->name + "." + std::to_string(++comm->children) + "-" + std::to_string(color);
  if (color == kNcclSplitNoColor) {
    *child = nullptr;
    return kNcclSuccess;
  }
  int world = 0, rank = 0;
  for (int peer = 0; peer < comm->world; ++peer) {
    const Notice& notice = comm->board->notice(Lane::kHost, peer, 0);
    if (notice.values[1] == color) {
      ++world;
      rank += notice.values[2] < key || (notice.values[2] == key && peer < comm->rank) ? 1 : 0;
    }
  }
  return make_comm(name, rank, world, config == nullptr ? comm->config : *config, child);
}

FAKE_EXPORT int ncclCommFinalize(NcclCommRef handle) {
  CommPtr comm;
  if (const int error = enter_with("ncclCommFinalize", handle, &comm)) {
    return error;
  }
  if (const int error = comm->tell_error()) {
    return error;
  }
  if (comm->is_finalized) {
    return fail(kNcclInvalidUsage, "ncclCommFinalize: the communicator was finalized");
  }
  comm->is_finalized = true;
  wait_until([&] { return comm->pending == 0; }, [&] { return comm->is_aborted.load(); });
  int error = 0;
  meet(*comm, "ncclCommFinalize", {{kFinalize}}, &error);
  return error;
}

// Waits for the work of this rank, and for the other ranks unless finalizing has done that or there was a failure.
FAKE_EXPORT int ncclCommDestroy(NcclCommRef handle) {
  CommPtr comm;
  if (const int error = enter_with("ncclCommDestroy", handle, &comm)) {
    return error;
  }
  wait_until([&] { return comm->pending == 0; }, [&] { return comm->is_aborted || comm->error != 0; });
  if (!comm->is_finalized && !comm->is_aborted && comm->error == 0) {
    int ignored = 0;  // what others call does not keep this rank from going
    meet(*comm, "ncclCommDestroy", {{kDestroy}}, &ignored);
  }
  end(handle);
  return kNcclSuccess;
}

// Of this rank alone: what it runs ends, what others wait for never comes.
FAKE_EXPORT int ncclCommAbort(NcclCommRef handle) {
  CommPtr comm;
  if (const int error = enter_with("ncclCommAbort", handle, &comm)) {
    return error;
  }
  stop(*comm, comm->is_aborted);
  end(handle);
  return kNcclSuccess;
}

}  // namespace bucketwheel
