#include "comm/nccl/api.h"

#include <dlfcn.h>
#include <unistd.h>

#include <mutex>
#include <utility>

#include "base/env.h"
#include "base/platform.h"

namespace bucketwheel {
namespace {

constexpr const char* kSoname = "libnccl.so.2";
constexpr const char* kRemedy =
    "install the package nvidia-nccl-cu13 (a CUDA build of torch brings it), or set BW_NCCL_LIB to the absolute path "
    "of "
    "a libnccl.so.2";

constexpr const char* kSymbols[] = {
#define BW_NCCL_SYMBOL(name, symbol, returns, parameters) #symbol,
    BW_NCCL_REQUIRED(BW_NCCL_SYMBOL) BW_NCCL_OPTIONAL(BW_NCCL_SYMBOL)
#undef BW_NCCL_SYMBOL
};

std::string last_dl_error() {
  const char* text = dlerror();  // NOLINT(concurrency-mt-unsafe): of this thread, in glibc
  return text == nullptr ? "unknown error" : text;
}

DeviceError unusable(const std::string& path, const std::string& found, const std::string& why) {
  return DeviceError("NCCL: " + path + " (" + found + ") cannot be used: " + why + "; " + kRemedy);
}

template <class Function>
bool resolve(void* library, const char* symbol, Function** function) {
  *function = reinterpret_cast<Function*>(dlsym(library, symbol));
  return *function != nullptr;
}

// Null when dlopen finds nothing; DeviceError when what it finds cannot be used.
std::shared_ptr<const NcclApi> open_nccl(const std::string& path, const std::string& found, int flags) {
  void* const library = dlopen(path.c_str(), flags);
  if (library == nullptr) {
    return nullptr;
  }
  auto api = std::make_shared<NcclApi>();
  api->path = path;
  api->found = found;
  std::string missing;
#define BW_NCCL_RESOLVE(name, symbol, returns, parameters)         \
  if (!resolve(library, #symbol, &api->name)) {                    \
    missing += std::string(missing.empty() ? "" : ", ") + #symbol; \
  }
  BW_NCCL_REQUIRED(BW_NCCL_RESOLVE)
#undef BW_NCCL_RESOLVE
#define BW_NCCL_RESOLVE(name, symbol, returns, parameters) resolve(library, #symbol, &api->name);
  BW_NCCL_OPTIONAL(BW_NCCL_RESOLVE)
#undef BW_NCCL_RESOLVE
  // The version first: an old library is old rather than incomplete.
  if (api->get_version != nullptr) {
    Dl_info info{};
    if (dladdr(reinterpret_cast<void*>(api->get_version), &info) != 0 && info.dli_fname != nullptr) {
      api->path = info.dli_fname;
    }
    if (const int result = api->get_version(&api->version); result != kNcclSuccess) {
      throw unusable(api->path, found, "ncclGetVersion returned " + std::to_string(result));
    }
    if (api->version < kNcclOldest) {
      throw unusable(api->path, found,
                     "it is version " + nccl_version_text(api->version) + ", expected " +
                         nccl_version_text(kNcclOldest) + " or newer");
    }
  }
  if (!missing.empty()) {
    throw unusable(api->path, found, "it has no " + missing);
  }
  const bool has_windows = api->mem_alloc != nullptr && api->mem_free != nullptr &&
                           api->comm_window_register != nullptr && api->comm_window_deregister != nullptr;
  api->features.windows = has_windows;
  api->features.zero_cta = has_windows && api->version >= 22800;
  api->features.symmetric_avg = has_windows && api->version >= 23000;
  return api;
}

// By pointer and never freed: communicators may ask while the process ends.
struct Folders {
  std::mutex mutex;
  std::vector<std::string> paths;
};
Folders& folders() {
  static auto* const one = new Folders();
  return *one;
}

std::shared_ptr<const NcclApi> find_nccl() {
  if (!env().nccl_lib.empty()) {
    return load_nccl(env().nccl_lib, "BW_NCCL_LIB", RTLD_NOW | RTLD_LOCAL | kDeepBind);
  }
  if (auto api = open_nccl(kSoname, "loaded already", RTLD_NOW | RTLD_NOLOAD)) {
    return api;
  }
  std::vector<std::string> paths;
  {
    std::lock_guard lock(folders().mutex);
    paths = folders().paths;
  }
  std::string looked;
  for (const std::string& folder : paths) {
    const std::string path = folder + "/" + kSoname;
    if (access(path.c_str(), F_OK) == 0) {
      return load_nccl(path, "a Python package", RTLD_NOW | RTLD_LOCAL);
    }
    looked += folder + ", ";
  }
  if (auto api = open_nccl(kSoname, "the system", RTLD_NOW | RTLD_LOCAL)) {
    return api;
  }
  throw DeviceError(std::string("NCCL: no ") + kSoname + " is loaded, and none was found in " + looked +
                    "nor by the system's search (" + last_dl_error() + "); " + kRemedy);
}

}  // namespace

std::string nccl_version_text(int version) {
  const int major = version / 10000, minor = version / 100 % 100, patch = version % 100;
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

std::shared_ptr<const NcclApi> load_nccl(const std::string& path, const std::string& found, int flags) {
  if (auto api = open_nccl(path, found, flags)) {
    return api;
  }
  throw unusable(path, found, last_dl_error());
}

const NcclApi& nccl_api() {
  static const auto* const api = new std::shared_ptr<const NcclApi>(find_nccl());  // never freed, as `folders`
  return **api;
}

void set_nccl_folders(std::vector<std::string> paths) {
  std::lock_guard lock(folders().mutex);
  folders().paths = std::move(paths);
}

const char* symbol_of(NcclCall call) { return kSymbols[static_cast<size_t>(call)]; }

NcclError nccl_error(const NcclApi& api, NcclCall call, int result) {
  std::string message =
      std::string(symbol_of(call)) + ": " + std::to_string(result) + " " + api.get_error_string(result);
  const char* const detail = api.get_last_error(nullptr);
  CommFacts facts;
  facts.nccl_code = result;
  if (detail != nullptr && *detail != '\0') {
    facts.last_error = detail;
    message += "; " + facts.last_error;
  }
  return NcclError(message, std::move(facts));
}

void throw_nccl_absent(const NcclApi& api, NcclCall call) {
  throw DeviceError("NCCL " + nccl_version_text(api.version) + " at " + api.path + " has no " + symbol_of(call));
}

}  // namespace bucketwheel
