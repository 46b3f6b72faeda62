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

// By rank: the last operation that it is known to have issued (0: none), nothing where that is not known.
using LastSeqs = std::vector<std::optional<uint64_t>>;

// What is known of a communicator's failure beside the message. In Python: attributes of the error.
struct CommFacts {
  std::string op{};          // "all_gather", ...: what failed here; empty: no operation
  uint64_t seq = 0;          // its number; without one, that of the last operation before; 0: none
  int rank = -1;             // whose failure it is, which may be another's; -1: no single rank's
  int nccl_code = 0;         // what NCCL's call returned on that rank; 0: it was none of NCCL's
  std::string last_error{};  // NCCL's own words for that
  LastSeqs last_seqs{};      // of a timeout
  std::string reason{};      // the message without what it begins with; empty: the whole
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

}  // namespace bucketwheel

// A precondition. `message` is built only when it fails.
#define BW_EXPECTS(condition, message)          \
  do {                                          \
    if (!(condition)) {                         \
      throw ::bucketwheel::ValueError(message); \
    }                                           \
  } while (0)
