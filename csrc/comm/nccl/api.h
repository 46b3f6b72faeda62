// NCCL as a table of functions, found at run time: the copy that torch loaded, or another one.
//
// NCCL is never linked, and nothing of its headers is needed: what this file declares is the public C ABI, which NCCL
// keeps from version to version. tests/native/test_nccl_header.py compares every value, offset and signature with the
// real nccl.h. Types are those of the C ABI: an int result is an ncclResult_t, a void* stream is a cudaStream_t.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"

namespace bucketwheel {

// ---- the ABI

struct NcclUniqueId {  // passed by value
  char internal[128];
};
using NcclCommRef = struct NcclCommOpaque*;      // an ncclComm_t
using NcclWindowRef = struct NcclWindowOpaque*;  // an ncclWindow_t

inline constexpr int kNcclSuccess = 0;
inline constexpr int kNcclUnhandledCudaError = 1;
inline constexpr int kNcclSystemError = 2;
inline constexpr int kNcclInternalError = 3;
inline constexpr int kNcclInvalidArgument = 4;
inline constexpr int kNcclInvalidUsage = 5;
inline constexpr int kNcclRemoteError = 6;
inline constexpr int kNcclInProgress = 7;
inline constexpr int kNcclTimeout = 8;  // newer than 2.28

enum class NcclType : int {
  kInt8 = 0,
  kUInt8 = 1,
  kInt32 = 2,
  kUInt32 = 3,
  kInt64 = 4,
  kUInt64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBFloat16 = 9,
};

// An ncclRedOp_t is one of these, or what red_op_create_pre_mul_sum returns.
inline constexpr int kNcclSum = 0;
inline constexpr int kNcclAvg = 4;

// Where the scalar of red_op_create_pre_mul_sum is: read before the call returns.
inline constexpr int kNcclScalarHostImmediate = 1;

inline constexpr int kNcclUndefined = INT_MIN;  // of an int of NcclConfig: NCCL's own choice
inline constexpr int kNcclSplitNoColor = -1;
inline constexpr int kNcclCtaPolicyDefault = 0;
inline constexpr int kNcclCtaPolicyEfficiency = 1;
inline constexpr int kNcclCtaPolicyZero = 2;
inline constexpr int kNcclWindowDefault = 0;
inline constexpr int kNcclWindowSymmetric = 1;
inline constexpr size_t kNcclWindowAlignment = 4096;

// The oldest version that is accepted, 2.27.0 (major * 10000 + minor * 100 + patch).
inline constexpr int kNcclOldest = 22700;

// The head of ncclConfig_t that every version since kNcclOldest has. NCCL copies as many bytes as `size_bytes` says and
// takes its defaults for the rest, so newer versions accept it.
struct NcclConfig {
  size_t size_bytes = sizeof(NcclConfig);
  unsigned magic = 0xcafebeefu;
  unsigned version = kNcclOldest;
  int blocking = 1;  // [Note: blocking calls], session.h
  int cga_cluster_size = kNcclUndefined;
  int min_ctas = kNcclUndefined;
  int max_ctas = kNcclUndefined;
  const char* net_name = nullptr;
  int split_share = 0;  // shared resources would put a pair's operations in one order
  int traffic_class = kNcclUndefined;
  const char* comm_name = nullptr;
  int collnet_enable = kNcclUndefined;
  int cta_policy = kNcclUndefined;
};

// For what only moves elements, and so takes every dtype: NCCL has no 16-bit integers, they go as bytes.
constexpr NcclType nccl_move_type(DType dtype) {
  using enum NcclType;
  constexpr NcclType kTypes[] = {kFloat32, kBFloat16, kFloat16, kFloat64, kInt64, kInt32, kUInt8, kUInt8, kInt8};
  return kTypes[static_cast<size_t>(dtype)];
}
// TypeError for what NCCL does not have.
constexpr NcclType nccl_type(DType dtype) {
  if (dtype == DType::kInt16) {
    throw TypeError(std::string("NCCL has no ") + name_of(dtype));
  }
  return nccl_move_type(dtype);
}
constexpr size_t nccl_move_count(DType dtype, size_t numel) {
  return dtype == DType::kInt16 ? numel * size_of(dtype) : numel;
}

// X(member, symbol, returns, parameters). Thread-safety is NCCL's: one thread at a time per communicator, and operations
// are not issued in parallel on communicators of one device.
#define BW_NCCL_REQUIRED(X)                                                                                         \
  X(get_version, ncclGetVersion, int, (int* version))                                                               \
  X(get_unique_id, ncclGetUniqueId, int, (NcclUniqueId * id))                                                       \
  X(get_error_string, ncclGetErrorString, const char*, (int result))                                                \
  X(get_last_error, ncclGetLastError, const char*, (NcclCommRef comm)) /* comm may be null */                       \
  X(comm_init_rank_config, ncclCommInitRankConfig, int,                                                             \
    (NcclCommRef * comm, int world, NcclUniqueId id, int rank, NcclConfig* config))                                 \
  X(comm_split, ncclCommSplit, int, (NcclCommRef comm, int color, int key, NcclCommRef* child, NcclConfig* config)) \
  X(comm_abort, ncclCommAbort, int, (NcclCommRef comm))                                                             \
  X(comm_destroy, ncclCommDestroy, int, (NcclCommRef comm))                                                         \
  X(comm_finalize, ncclCommFinalize, int, (NcclCommRef comm))                                                       \
  X(comm_get_async_error, ncclCommGetAsyncError, int, (NcclCommRef comm, int* error))                               \
  X(comm_count, ncclCommCount, int, (NcclCommRef comm, int* count))                                                 \
  X(comm_user_rank, ncclCommUserRank, int, (NcclCommRef comm, int* rank))                                           \
  X(group_start, ncclGroupStart, int, ())                                                                           \
  X(group_end, ncclGroupEnd, int, ())                                                                               \
  X(all_gather, ncclAllGather, int,                                                                                 \
    (const void* send, void* recv, size_t send_count, NcclType type, NcclCommRef comm, void* stream))               \
  X(reduce_scatter, ncclReduceScatter, int,                                                                         \
    (const void* send, void* recv, size_t recv_count, NcclType type, int op, NcclCommRef comm, void* stream))       \
  X(broadcast, ncclBroadcast, int,                                                                                  \
    (const void* send, void* recv, size_t count, NcclType type, int root, NcclCommRef comm, void* stream))          \
  X(red_op_create_pre_mul_sum, ncclRedOpCreatePreMulSum, int,                                                       \
    (int* op, void* scalar, NcclType type, int residence, NcclCommRef comm))                                        \
  X(red_op_destroy, ncclRedOpDestroy, int, (int op, NcclCommRef comm))

// Null where the library has none; look at NcclFeatures rather than at them.
#define BW_NCCL_OPTIONAL(X)                                                                                      \
  X(mem_alloc, ncclMemAlloc, int, (void** data, size_t size_bytes))                                              \
  X(mem_free, ncclMemFree, int, (void* data))                                                                    \
  X(comm_window_register, ncclCommWindowRegister, int,                                                           \
    (NcclCommRef comm, void* data, size_t size_bytes, NcclWindowRef* window, int flags)) /* may leave it null */ \
  X(comm_window_deregister, ncclCommWindowDeregister, int, (NcclCommRef comm, NcclWindowRef window))

// ---- the table

// What this version does, by its number and by the symbols it has; whether this machine can is known only to a
// communicator (a window may come back null).
struct NcclFeatures {
  bool windows = false;        // 2.27: registered memory of one communicator
  bool zero_cta = false;       // 2.28: all-gathers by copy engines
  bool symmetric_avg = false;  // 2.30: kAvg in the kernels for windows
};

struct NcclApi {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a declaration
#define BW_NCCL_MEMBER(name, symbol, returns, parameters) returns(*name) parameters = nullptr;
  BW_NCCL_REQUIRED(BW_NCCL_MEMBER)
  BW_NCCL_OPTIONAL(BW_NCCL_MEMBER)
#undef BW_NCCL_MEMBER
  std::string path;   // of the file
  std::string found;  // how: "BW_NCCL_LIB", "loaded already", "a Python package" or "the system"
  int version = 0;
  NcclFeatures features;
};

// "2.28.9" of 22809.
std::string nccl_version_text(int version);

// The library at `path` (a path, or a name for the system's search), opened with these flags of dlopen and never
// closed; `found` says in messages how it came to be asked for. DeviceError when it is not there, lacks a required
// symbol or is older than kNcclOldest.
std::shared_ptr<const NcclApi> load_nccl(const std::string& path, const std::string& found, int flags);

// The process's, found at the first call and the same from then on; thread-safe. Looked for in this order:
// 1. BW_NCCL_LIB, which keeps to itself whatever NCCL the process has beside it;
// 2. the copy that is loaded already, which in general is torch's: two NCCLs in one process take turns badly;
// 3. libnccl.so.2 in the folders of set_nccl_folders();
// 4. libnccl.so.2 by the system's search.
// DeviceError, again at every call, when there is none that can be used.
const NcclApi& nccl_api();

// Before the first nccl_api(), else without effect.
void set_nccl_folders(std::vector<std::string> paths);

// ---- calling

enum class NcclCall : uint8_t {
#define BW_NCCL_ENUMERATOR(name, symbol, returns, parameters) name,
  BW_NCCL_REQUIRED(BW_NCCL_ENUMERATOR) BW_NCCL_OPTIONAL(BW_NCCL_ENUMERATOR)
#undef BW_NCCL_ENUMERATOR
};
const char* symbol_of(NcclCall call);

// A call that failed: "ncclAllGather: 3 internal error; <NCCL's last message, if any>".
struct NcclError : CommError {
  using CommError::CommError;
};
NcclError nccl_error(const NcclApi& api, NcclCall call, int result);
[[noreturn]] void throw_nccl_absent(const NcclApi& api, NcclCall call);

// NcclError unless the call succeeded.
inline void expect_success(const NcclApi& api, NcclCall call, int result) {
  if (result != kNcclSuccess) {
    throw nccl_error(api, call, result);
  }
}

// DeviceError where the library has no such function.
template <class Function, class... Args>
int call_nccl(const NcclApi& api, NcclCall call, Function* function, Args&&... args) {
  if (function == nullptr) {
    throw_nccl_absent(api, call);
  }
  return function(static_cast<Args&&>(args)...);
}

}  // namespace bucketwheel

// BW_NCCL_CALL(api, member, arguments...): the result code. BW_NCCL_TRY: the same, and it throws the failure.
#define BW_NCCL_CALL(api, name, ...) \
  ::bucketwheel::call_nccl((api), ::bucketwheel::NcclCall::name, (api).name __VA_OPT__(, ) __VA_ARGS__)
#define BW_NCCL_TRY(api, name, ...)                                   \
  ::bucketwheel::expect_success((api), ::bucketwheel::NcclCall::name, \
                                BW_NCCL_CALL(api, name __VA_OPT__(, ) __VA_ARGS__))
