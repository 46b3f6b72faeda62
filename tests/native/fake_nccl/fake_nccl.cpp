// NCCL's functions: groups, collectives, the life of communicators. Memory and windows: windows.cpp.
#include "fake_nccl.h"

#include <algorithm>
#include <cstring>

#include "calls.h"
#include "comm.h"
#include "sums.h"

using namespace bucketwheel;

namespace fake_nccl {
namespace {

// Of a thread: what was called since the group began.
struct Group {
  int depth = 0;
  int error = 0;  // the first that ends the group; NCCL leaves a refused argument to its own call
  std::vector<Issue> issues;
};
thread_local Group group;
std::atomic<uint64_t> open_groups{0};

int in_group(int code) {
  if (group.depth > 0 && code != kNcclInvalidArgument && group.error == 0) {
    group.error = code;
  }
  return code;
}

// Fills what only the communicator knows.
int complete(const char* name, const Comm& comm, Operation& operation) {
  const auto refuse = [&](const std::string& why) {
    return fail(kNcclInvalidArgument, std::string(name) + ": " + why);
  };
  const bool sends = operation.function != Function::kBroadcast || operation.root == comm.rank;
  if (static_cast<int>(operation.type) < 0 || operation.type > NcclType::kBFloat16) {
    return refuse("no type " + std::to_string(static_cast<int>(operation.type)));
  }
  if (operation.count > 0 && (operation.recv == nullptr || (sends && operation.send == nullptr))) {
    return refuse("a buffer is null");
  }
  if (operation.root < 0 || operation.root >= comm.world) {
    return refuse("no rank " + std::to_string(operation.root));
  }
  if (operation.function != Function::kReduceScatter) {
    return kNcclSuccess;
  }
  if (operation.reduce > kNcclAvg) {
    const auto found = comm.reductions.find(operation.reduce);
    if (found == comm.reductions.end() || found->second.type != operation.type) {
      return refuse("the reduction is not of this communicator and type");
    }
    operation.premul = found->second;
    operation.reduce = kPreMulSum;
  }
  const bool is_known = operation.reduce == kNcclSum || operation.reduce >= kNcclAvg;
  if (!is_known || !can_reduce(operation.type)) {
    return refuse("no such reduction, or not for this type");
  }
  return kNcclSuccess;
}

int collective(const char* name, NcclCommRef handle, void* stream, Operation operation) {
  CommPtr comm;
  if (const int error = enter_with(name, handle, &comm)) {
    return in_group(error);
  }
  if (const int error = comm->tell_error()) {
    return in_group(error);
  }
  if (comm->is_finalized) {
    return in_group(fail(kNcclInvalidUsage, std::string(name) + ": the communicator was finalized"));
  }
  if (const int error = complete(name, *comm, operation)) {
    return in_group(error);
  }
  operation.hangs = next_operation_hangs();
  if (group.depth > 0) {
    group.issues.push_back({std::move(comm), operation, stream});
    return kNcclSuccess;
  }
  return submit({{comm, operation, stream}});
}

}  // namespace

bool is_in_group() { return group.depth > 0; }

}  // namespace fake_nccl

FAKE_EXPORT uint64_t fake_nccl_open_groups() { return fake_nccl::open_groups; }

namespace bucketwheel {

using namespace fake_nccl;

FAKE_EXPORT int ncclGroupStart() {
  if (const int error = enter("ncclGroupStart")) {
    return error;
  }
  if (group.depth++ == 0) {
    ++open_groups;
  }
  return kNcclSuccess;
}

FAKE_EXPORT int ncclGroupEnd() {
  const auto is_aborted = [] {
    return std::any_of(group.issues.begin(), group.issues.end(),
                       [](const Issue& issue) { return issue.comm->is_aborted.load(); });
  };
  int error = enter("ncclGroupEnd", is_aborted);
  if (group.depth == 0) {
    return error != 0 ? error : fail(kNcclInvalidUsage, "ncclGroupEnd: no group is open");
  }
  if (error == 0 && is_aborted()) {
    error = fail(kNcclInternalError, "ncclGroupEnd: a communicator of the group was aborted");
  }
  if (error != 0 && group.error == 0) {
    group.error = error;
  }
  if (--group.depth > 0) {
    return kNcclSuccess;  // the outermost group tells
  }
  --open_groups;
  error = std::exchange(group.error, 0);
  if (error == 0) {
    error = submit(group.issues);
  }
  group.issues.clear();
  return error;
}

#ifndef FAKE_NCCL_WITHOUT_ALL_GATHER
FAKE_EXPORT int ncclAllGather(const void* send, void* recv, size_t send_count, NcclType type, NcclCommRef comm,
                              void* stream) {
  return collective("ncclAllGather", comm, stream,
                    {Function::kAllGather, send, recv, send_count, type, kNcclSum, 0, {}, false});
}
#endif
FAKE_EXPORT int ncclReduceScatter(const void* send, void* recv, size_t recv_count, NcclType type, int op,
                                  NcclCommRef comm, void* stream) {
  return collective("ncclReduceScatter", comm, stream,
                    {Function::kReduceScatter, send, recv, recv_count, type, op, 0, {}, false});
}
FAKE_EXPORT int ncclBroadcast(const void* send, void* recv, size_t count, NcclType type, int root, NcclCommRef comm,
                              void* stream) {
  return collective("ncclBroadcast", comm, stream,
                    {Function::kBroadcast, send, recv, count, type, kNcclSum, root, {}, false});
}

FAKE_EXPORT int ncclRedOpCreatePreMulSum(int* op, void* scalar, NcclType type, int residence, NcclCommRef handle) {
  CommPtr comm;
  if (const int error = enter_with("ncclRedOpCreatePreMulSum", handle, &comm)) {
    return error;
  }
  if (op == nullptr || scalar == nullptr || !can_reduce(type) || residence != kNcclScalarHostImmediate) {
    return fail(kNcclInvalidArgument, "ncclRedOpCreatePreMulSum: null, or no such type or residence");
  }
  PreMul made{type, {}};
  std::memcpy(made.scalar.data(), scalar, bytes_of(type));
  *op = comm->next_reduce++;
  comm->reductions[*op] = made;
  return kNcclSuccess;
}
FAKE_EXPORT int ncclRedOpDestroy(int op, NcclCommRef handle) {
  CommPtr comm;
  if (const int error = enter_with("ncclRedOpDestroy", handle, &comm)) {
    return error;
  }
  return comm->reductions.erase(op) == 1 ? kNcclSuccess
                                         : fail(kNcclInvalidArgument, "ncclRedOpDestroy: no such reduction");
}

FAKE_EXPORT int ncclCommGetAsyncError(NcclCommRef handle, int* error) {
  CommPtr comm;
  if (const int failure = enter_with("ncclCommGetAsyncError", handle, &comm)) {
    return failure;
  }
  if (error == nullptr) {
    return fail(kNcclInvalidArgument, "ncclCommGetAsyncError: error is null");
  }
  const int scripted = async_error_of_script();
  *error = scripted != 0 ? fail(scripted, "the script has an asynchronous error") : comm->tell_error();
  return kNcclSuccess;
}

#define FAKE_QUESTION(function, value)                                                  \
  FAKE_EXPORT int function(NcclCommRef handle, int* to) {                               \
    CommPtr comm;                                                                       \
    if (const int error = enter_with(#function, handle, &comm)) {                       \
      return error;                                                                     \
    }                                                                                   \
    if (to == nullptr) {                                                                \
      return fail(kNcclInvalidArgument, #function ": the place of the answer is null"); \
    }                                                                                   \
    *to = value;                                                                        \
    return kNcclSuccess;                                                                \
  }
FAKE_QUESTION(ncclCommCount, comm->world)
FAKE_QUESTION(ncclCommUserRank, comm->rank)
#undef FAKE_QUESTION

}  // namespace bucketwheel
