// The errors of bucketwheel, one C++ type for each Python type in bucketwheel/errors.py.
//
// A message says what was asked, what was found and where. Errors of a communicator start with
// "[bucketwheel rank r/w comm 'name' seq n]"; the communicator adds that prefix.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace bucketwheel {

// Bad arguments; nothing was enqueued or changed. ValueError and TypeError in Python.
struct ValueError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};
struct TypeError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// The root of everything else: bucketwheel.Error (a RuntimeError).
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct DeviceError : Error {
  using Error::Error;
};
struct OutOfMemory : DeviceError {
  using DeviceError::DeviceError;
};
struct CaptureError : DeviceError {
  using DeviceError::DeviceError;
};

// By rank: the number of the last operation that it has issued (0: none); no value where that is not known.
using LastSeqs = std::vector<std::optional<uint64_t>>;

// A communicator's failure beside the message. In Python: attributes of the error.
struct CommFacts {
  std::string op{};          // the operation that failed here: "all_gather", ...; empty: none
  uint64_t seq = 0;          // its number; without an operation, that of the last one before; 0: none
  int rank = -1;             // the rank that caused the failure; -1: no single one
  int nccl_code = 0;         // what NCCL returned on that rank; 0: not a failure of NCCL
  std::string last_error{};  // NCCL's text for it
  LastSeqs last_seqs{};      // of a timeout
  std::string reason{};      // the message without its prefix; empty: the whole message
};

struct CommError : Error {
  explicit CommError(const std::string& message, CommFacts facts = {}) : Error(message), facts(std::move(facts)) {}
  CommFacts facts;
};
struct PeerError : CommError {
  using CommError::CommError;
};
struct CommTimeout : CommError {
  using CommError::CommError;
};
struct MismatchError : CommError {
  using CommError::CommError;
};
struct ClosedError : CommError {
  using CommError::CommError;
};

struct PoolError : Error {
  using Error::Error;
};
struct ReleasedTwice : PoolError {
  using PoolError::PoolError;
};
struct UseAfterRelease : PoolError {
  using PoolError::PoolError;
};
struct LeaseLeak : PoolError {
  using PoolError::PoolError;
};
struct KeyBusy : PoolError {
  using PoolError::PoolError;
};
struct PoolBusy : PoolError {
  using PoolError::PoolError;
};
struct UnknownKey : PoolError {
  using PoolError::PoolError;
};
struct SizeExceedsPlan : PoolError {
  using PoolError::PoolError;
};
struct PlanDiverged : PoolError {
  using PoolError::PoolError;
};

}  // namespace bucketwheel

// A precondition. `message` is built only when it fails.
#define BW_EXPECTS(condition, message)          \
  do {                                          \
    if (!(condition)) {                         \
      throw ::bucketwheel::ValueError(message); \
    }                                           \
  } while (0)
