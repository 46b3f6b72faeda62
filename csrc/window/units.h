// Units: the gathers of sharded parameters, and the memory that they have. plan/residency.h decides, this carries out.
//
// A unit's memory is a turn (places.h): in the place that the plan has for it, or on the side. Its gather, which writes there,
// is behind the last use of these bytes (in), and the users of the parameters wait for it (out). The bytes are given on behind
// what the caller's stream holds when the unit is let go; on the CPU the caller's use is over by then.
//
// A unit that is gathered ahead and not yet waited for keeps its bytes. It gives them up where another unit needs its place
// there: nobody has used it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "plan/residency.h"
#include "window/places.h"
#include "window/reductions.h"

namespace bucketwheel {

struct UnitSpec {
  std::string name;
  size_t size_bytes;
};

struct UnitCallbacks {
  // The gather of a unit into this memory. `owner` keeps the bytes mapped.
  std::function<std::shared_ptr<const Request>(int unit, std::byte* data, const std::shared_ptr<void>& owner)> bind;
  // The parameters are those in the unit's memory now, or absent.
  std::function<void(int unit, bool is_here)> assign;
  // Throws on all ranks unless all of them call it alike.
  std::function<void(int unit, const char* what)> agree;
  Aside aside;
};

// Not thread-safe.
class Units {
 public:
  Units(CommRef comm, std::vector<UnitSpec> units, const std::vector<uint8_t>& stays, int prefetch,
        UnitCallbacks callbacks);

  // All units are absent. `numbers`: by regime and unit the number of the key in `plan`, -1: none. `stream`: CUDA.
  void set_plan(PoolPlan plan, std::vector<int> numbers, const StreamRef& stream);
  // `stream`: of the users, null on the CPU; in all calls below.
  void step(const ResidencyEvent& event, const StreamRef& stream);
  // A step is next, or something else that writes to parameters. Whether there is a new record.
  bool end_step(const StreamRef& stream);
  // The unit is gathered, in `in` where that is not null, and stays until let_go(). Its parameters are assigned at once, and
  // have their values when the handle says so.
  HandleRef hold(int unit, const StreamRef& stream, const StreamRef& in);
  void let_go(int unit, bool keeps, const StreamRef& stream);
  void wait(int unit, const StreamRef& stream);

  Residency& machine() { return machine_; }
  const Residency& machine() const { return machine_; }
  const Places& places() const { return *places_; }
  const Turn& turn(int unit) const { return units_.at(static_cast<size_t>(unit)).turn; }
  double waited_s(int unit) const { return units_.at(static_cast<size_t>(unit)).waited_s; }
  uint64_t wasted_bytes() const { return wasted_bytes_; }
  int count() const { return machine_.units(); }

 private:
  struct Unit {
    UnitSpec spec;
    Turn turn = {};           // while it is gathered, or being gathered
    HandleRef handle = {};    // of its gather; until it has been waited for
    HandleRef gathered = {};  // the same; until the next gather
    double waited_s = 0;
  };
  Unit& at(int unit) { return units_.at(static_cast<size_t>(unit)); }

  void carry_out(const ResidencyActions& actions, const StreamRef& stream, const StreamRef& in = nullptr);
  void release(const std::vector<int>& units, const StreamRef& stream);
  void gather(int unit, const StreamRef& stream, const StreamRef& in);
  void make_free(int number, const StreamRef& stream);

  const CommRef comm_;
  Residency machine_;
  const UnitCallbacks callbacks_;
  std::vector<Unit> units_;
  std::unique_ptr<Places> places_;
  std::vector<int> numbers_;
  uint64_t wasted_bytes_ = 0;
};

}  // namespace bucketwheel
