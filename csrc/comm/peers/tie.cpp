#include "comm/peers/tie.h"

#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "comm/peers/peers.h"

namespace bucketwheel {
namespace {

bool is_of_peer(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerError&) {
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// What `to` fails with because of `from`; nothing while that is well, or is being closed.
std::optional<Failure> passed_on(Peers& from, int to_rank) {
  Health& health = from.health();
  Failure failure{FailureKind::kPeer, "in the other group (process_group or replicate_group): ", to_rank};
  if (health.has_failed()) {
    if (!is_of_peer(health.error())) {
      failure.kind = FailureKind::kAborted;
      failure.text = "aborted by rank " + std::to_string(to_rank) + ": " + failure.text;
    }
    failure.text += health.message();
    return failure;
  }
  if (health.is_closing()) {
    return {};
  }
  const std::optional<Failure> theirs = from.trouble(0, [](int) { return false; }, nullptr);
  if (!theirs) {
    return {};
  }
  failure.text += health.prefix(theirs->seq) + theirs->text;
  return failure;
}

void pass_on(Peers& from, Peers& to) {
  Health& health = to.health();
  if (health.has_failed() || health.is_closing()) {
    return;
  }
  if (const auto failure = passed_on(from, health.rank())) {
    to.fail(*failure, {.seq = health.last_seq()});
  }
}

}  // namespace

Tie::Tie(CommRef one, CommRef other)
    : one_(std::move(one)), other_(std::move(other)), watch_(watch([this] { look(); })) {}

Tie::~Tie() {
  if (process_.is_foreign()) {
    return;
  }
  watch_->stop();
  look();
}

void Tie::look() const {
  pass_on(one_->peers(), other_->peers());
  pass_on(other_->peers(), one_->peers());
}

}  // namespace bucketwheel
