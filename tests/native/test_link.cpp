// comm/peers/link: what is heard of a process at the other end, and what its end looks like. Run by test_native.py.
// needs: base
// with: csrc/comm/peers/link.cpp
// runs: plain address thread
// slow: plain address
#include <sys/socket.h>

#include <chrono>
#include <utility>

#include "check.h"
#include "comm/peers/link.h"
#include "links.h"

using namespace bucketwheel;
using namespace std::chrono_literals;

namespace {

void expect_state(Link& link, Link::State state) {
  sleep_until([&] { return link.look() == state; });
}

}  // namespace

TEST(goodbyes_come_before_the_end) {
  auto [one, other] = linked();
  CHECK(one->look() == Link::State::kOpen);
  other->tell_left(7);
  other->tell_left(uint64_t{1} << 63);
  other.reset();
  expect_state(*one, Link::State::kEnded);
  CHECK(one->has_left(7));
  CHECK(one->has_left(uint64_t{1} << 63));
  CHECK(!one->has_left(8));
}

TEST(goodbyes_of_both_at_once_are_heard) {
  auto [one, other] = linked();
  one->tell_left(7);
  other->tell_left(7);
  sleep_until([&] { return other->look() != Link::State::kOpen || other->has_left(7); });
  other.reset();
  expect_state(*one, Link::State::kEnded);
  CHECK(one->has_left(7));
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
