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
  virtual const char* name() const noexcept { return "Error"; }  // of the class in Python
};

// An error that differs from its base in its class alone.
#define BW_ERROR(Name, Base)                                     \
  struct Name : Base {                                           \
    using Base::Base;                                            \
    const char* name() const noexcept override { return #Name; } \
  }

BW_ERROR(DeviceError, Error);
struct OutOfMemory : DeviceError {  // a DeviceError in Python
  using DeviceError::DeviceError;
};
BW_ERROR(CaptureError, DeviceError);

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
  const char* name() const noexcept override { return "CommError"; }
  CommFacts facts;
};
BW_ERROR(PeerError, CommError);
BW_ERROR(CommTimeout, CommError);
BW_ERROR(MismatchError, CommError);
BW_ERROR(ClosedError, CommError);

BW_ERROR(PoolError, Error);
BW_ERROR(ReleasedTwice, PoolError);
BW_ERROR(UseAfterRelease, PoolError);
BW_ERROR(LeaseLeak, PoolError);
BW_ERROR(KeyBusy, PoolError);
BW_ERROR(PoolBusy, PoolError);
BW_ERROR(UnknownKey, PoolError);
BW_ERROR(SizeExceedsPlan, PoolError);
BW_ERROR(PlanDiverged, PoolError);

}  // namespace bucketwheel

// A precondition, and its message, which is built only when it fails.
#define BW_EXPECTS(condition, ...)                  \
  do {                                              \
    if (!(condition)) {                             \
      throw ::bucketwheel::ValueError(__VA_ARGS__); \
    }                                               \
  } while (0)
