// comm/peers/store_peers: what a rank is told of the others, and tells. Run by test_native.py.
// needs: base device kernels pool comm
// runs: plain thread address
// slow: address
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "base/error.h"
#include "check.h"
#include "comm/peers/patience.h"
#include "comm/peers/store_peers.h"
#include "links.h"

using namespace bucketwheel;
using namespace std::chrono_literals;

namespace {

constexpr const char* kId = "00000000000000ff";

// Rank 0 of three, and the ends of its links that ranks 1 and 2 have.
struct Three {
  std::pair<LinkRef, LinkRef> following = linked();
  std::pair<LinkRef, LinkRef> before = linked();
  std::shared_ptr<Bell> bell = std::make_shared<Bell>();
  std::shared_ptr<StorePeers> peers = std::make_shared<StorePeers>(
      "far", 0, 3, 20s,
      StorePeers::Ways{[](auto) {},
                       [](auto, const auto&) { return StorePeers::Payloads(); },
                       {{1, std::exchange(following.first, nullptr)}, {2, std::exchange(before.first, nullptr)}},
                       bell},
      kId);
  LinkRef& of_1 = following.second;
  LinkRef& of_2 = before.second;
  ~Three() {
    peers->join();
    peers->part(Clock::now());
  }
};

std::optional<Failure> trouble(StorePeers& peers, int needed) {
  return peers.trouble(0, [=](int rank) { return rank == needed; }, "this");
}

}  // namespace

TEST(the_end_of_a_neighbour_is_to_be_told) {
  Three three;
  three.of_2.reset();
  three.bell->wait(Clock::now() + 10s);
  const auto report = three.peers->report();
  CHECK(report && report->kind == FailureKind::kPeer && report->rank == 2 && report->text == "rank 2 died");
  three.peers->told();
  CHECK(!three.peers->report());
  CHECK(!trouble(*three.peers, 2));  // until the Store has said that no other failure came first
  three.peers->deliver({FailureKind::kPeer, "rank 2 aborted", 2});
  CHECK(trouble(*three.peers, -1)->text == "rank 2 aborted");
}

TEST(where_nobody_tells_it_in_time_the_neighbour_fails_by_itself) {
  Three three;
  const auto begin = Clock::now();
  three.of_2.reset();
  sleep_until([&] { return trouble(*three.peers, -1).has_value(); });
  CHECK(Clock::now() - begin >= kPatience.peer);
  CHECK(trouble(*three.peers, -1)->text == "rank 2 died");
}

TEST(who_leaves_in_order_is_missed_only_by_those_who_need_it) {
  Three three;
  three.of_1->tell_left(0xff);
  three.of_1.reset();
  three.of_2->tell_left(0xfe);  // of another communicator
  sleep_until([&] { return trouble(*three.peers, 1).has_value(); });
  CHECK(trouble(*three.peers, 1)->text == "rank 1 has closed the communicator; needed for this");
  CHECK(!trouble(*three.peers, 2) && !three.peers->report());
}

TEST(who_leaves_says_goodbye_at_once_and_to_both) {
  Three three;
  const auto begin = Clock::now();
  three.peers->join();
  three.peers->part(Clock::now() + 10s);
  CHECK(Clock::now() - begin < 1s);
  sleep_until([&] { return three.of_1->look() == Link::State::kEnded; });
  CHECK(three.of_1->has_left(0xff));
  sleep_until([&] { return three.of_2->look() == Link::State::kEnded; });
  CHECK(three.of_2->has_left(0xff));
  CHECK_THROWS(ClosedError, "closed", three.peers->post({}));
}

TEST(who_has_failed_leaves_once_that_has_been_told_and_read) {
  Three three;
  (void)three.peers->fail({FailureKind::kError, "first", 0, 1}, {});
  (void)three.peers->fail({FailureKind::kError, "second", 0, 2}, {});
  three.peers->deliver({FailureKind::kError, "third", 1, 3});
  CHECK_THROWS(CommError, "first", three.peers->health().expect_usable());
  std::atomic<bool> has_left{false};
  std::thread leaver([&] {
    three.peers->join();
    three.peers->part(Clock::now() + 10s);
    has_left = true;
  });
  std::this_thread::sleep_for(50ms);
  CHECK(!has_left);
  CHECK(three.peers->report()->text == "first");
  three.peers->told();
  const auto begin = Clock::now();
  leaver.join();
  CHECK(Clock::now() - begin >= kPatience.read - 60ms);
}

TEST(a_store_that_is_gone_is_told_to_nobody_and_waited_for_a_while) {
  Three three;
  (void)three.peers->last_seqs(0);
  three.peers->lose_store();
  const auto begin = Clock::now();
  CHECK(*three.peers->last_seqs(0) == LastSeqs({0, std::nullopt, std::nullopt}));
  sleep_until([&] { return trouble(*three.peers, 1).has_value(); });
  CHECK(Clock::now() - begin >= kPatience.store - 100ms);
}

TEST(they_ask_and_are_answered_while_others_issue) {
  Three three;
  StorePeers& peers = *three.peers;
  std::atomic<bool> is_over{false};
  std::thread issuer([&] {
    for (uint64_t seq = 1; !is_over; ++seq) {
      peers.note_issued(1, seq);
    }
  });
  CHECK(!peers.last_seqs(1));
  std::thread carrier([&] {
    three.bell->wait(Clock::now() + 10s);
    CHECK(!peers.report() && peers.asks());
    peers.answer({peers.progress(), StorePeers::Progress{{7, 8, 9}, "is in a call"}});
  });
  const auto begin = Clock::now();
  std::optional<LastSeqs> last;
  while (!(last = peers.last_seqs(1))) {
    CHECK(Clock::now() - begin < kPatience.answer + 1s);
    std::this_thread::sleep_for(1ms);
  }
  carrier.join();
  is_over = true;
  issuer.join();
  CHECK(last->size() == 3 && (*last)[1] == 8u && !(*last)[2]);
  CHECK(*peers.last_rounds() == LastSeqs({0, 9, std::nullopt}));
  CHECK(peers.late_text({8, 7, std::nullopt}, 8, "issued", "gather") ==
        ". Not arrived: rank 1 (is in a call, has not called gather, last issued 7): call it on all ranks. Unknown (no "
        "answer): rank 2");
  CHECK(peers.late_text({8, 8, 9}, 8, "issued", "gather") == ", which all ranks have issued");
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
