// What most native tests and fakes include. cmake/ compiles it once for each preset and puts it in front of each source
// (a precompiled header): reading these headers takes longer than compiling what is behind them. Sources include
// what they need all the same. It has no `#pragma once`: nothing includes it, and to compile one that has it is a warning.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "comm/host/local.h"
#include "device/device_cuda.h"
#include "pool/pool.h"
