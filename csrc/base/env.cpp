#include "base/env.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

#include "base/error.h"

namespace bucketwheel {
namespace {

std::string read(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): once, and nothing here ever sets one
  return value == nullptr ? std::string() : std::string(value);
}

ValueError bad_value(const char* name, const std::string& value, const char* allowed) {
  return ValueError(std::string("environment variable ") + name + "='" + value + "': " + allowed);
}

bool read_flag(const char* name) {
  const std::string value = read(name);
  if (value.empty() || value == "0") {
    return false;
  }
  if (value == "1") {
    return true;
  }
  throw bad_value(name, value, "expected 0 or 1");
}

std::optional<uint64_t> read_seed(const char* name) {
  const std::string value = read(name);
  if (value.empty()) {
    return std::nullopt;
  }
  if (value.size() > 18 || value.find_first_not_of("0123456789") != std::string::npos) {
    throw bad_value(name, value, "expected a whole number of at most 18 digits");
  }
  return std::stoull(value);
}

std::optional<Isa> read_isa(const char* name) {
  const std::string value = read(name);
  if (value.empty()) {
    return std::nullopt;
  }
  if (value == "plain") {
    return Isa::kPlain;
  }
  if (value == "avx2") {
    return Isa::kAvx2;
  }
  if (value == "avx512") {
    return Isa::kAvx512;
  }
  throw bad_value(name, value, "expected 'plain', 'avx2' or 'avx512'");
}

std::string read_absolute_path(const char* name) {
  std::string value = read(name);
  if (!value.empty() && value.front() != '/') {
    throw bad_value(name, value, "expected an absolute path");
  }
  return value;
}

// Made if need be: when it is written to, something has failed already, and nothing else may.
std::string read_writable_folder(const char* name) {
  std::string value = read(name);
  if (value.empty()) {
    return value;
  }
  std::error_code error;
  std::filesystem::create_directories(value, error);
  if (error || !std::filesystem::is_directory(value, error) || access(value.c_str(), W_OK | X_OK) != 0) {
    throw bad_value(name, value, "expected a folder that can be made, or be written to");
  }
  return std::filesystem::absolute(value).string();
}

Env* read_all() {
  Env env;
  const std::string stream = read("BW_HOST_STREAM");
  if (!stream.empty() && stream != "inline" && stream != "thread") {
    throw bad_value("BW_HOST_STREAM", stream, "expected 'thread' or 'inline'");
  }
  env.stream_inline = stream == "inline";
  env.stream_fuzz_seed = read_seed("BW_HOST_STREAM_FUZZ");
  env.pool_poison = read_flag("BW_POOL_POISON");
  env.cpu_isa = read_isa("BW_CPU_ISA");
  env.trace_dir = read_writable_folder("BW_TRACE_DIR");
  env.nccl_lib = read_absolute_path("BW_NCCL_LIB");
  return new Env(env);
}

}  // namespace

const Env& env() {
  static const Env* const values = read_all();  // never freed: streams may ask at process exit
  return *values;
}

}  // namespace bucketwheel
