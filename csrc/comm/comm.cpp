#include "comm/comm.h"

#include <utility>

#include "comm/operation.h"

namespace bucketwheel {

HandleRef Comm::all_gather(std::span<const Segment> segments, const IssueOptions& options) {
  expect_usable();
  return issue(make_operation({Collective::kAllGather, {}, 0}, segments, nullptr, rank(), world()), options);
}

HandleRef Comm::reduce_scatter(std::span<const Segment> segments, Reduction reduction, std::shared_ptr<ReduceSink> sink,
                               const IssueOptions& options) {
  expect_usable();
  return issue(make_operation({Collective::kReduceScatter, reduction, 0}, segments, std::move(sink), rank(), world()),
               options);
}

HandleRef Comm::broadcast(const View& tensor, int root, const IssueOptions& options) {
  expect_usable();
  const Segment segment{tensor, tensor};
  return issue(make_operation({Collective::kBroadcast, {}, root}, {&segment, 1}, nullptr, rank(), world()), options);
}

HandleRef Request::start(IssueOptions options) const {
  comm_->expect_usable();
  options.keepalive.insert(options.keepalive.end(), keepalive_.begin(), keepalive_.end());
  return comm_->issue(std::make_shared<Operation>(*op_), options);
}

}  // namespace bucketwheel
