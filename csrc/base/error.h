// The errors of bucketwheel, one C++ type for each Python type in bucketwheel/errors.py.
//
// A message says what was asked, what was found and where. Errors of a communicator start with
// "[bucketwheel rank r/w comm 'name' seq n]"; the communicator adds that prefix.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

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

struct CommError : Error {
  using Error::Error;
};
struct PeerError : CommError {
  PeerError(int rank, std::string message) : CommError(std::move(message)), rank(rank) {}
  int rank;
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
