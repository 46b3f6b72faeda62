#include "comm/comm.h"

#include <utility>

#include "comm/operation.h"

namespace bucketwheel {

HandleRef Comm::all_gather(std::vector<Segment> segments, IssueOptions options, std::shared_ptr<ReduceSink> sink) {
  expect_usable();
  return issue(make_operation({Collective::kAllGather, {}, 0}, std::move(segments), std::move(sink), rank(), world()),
               std::move(options));
}

HandleRef Comm::reduce_scatter(std::vector<Segment> segments, Reduction reduction, std::shared_ptr<ReduceSink> sink,
                               IssueOptions options) {
  expect_usable();
  return issue(
      make_operation({Collective::kReduceScatter, reduction, 0}, std::move(segments), std::move(sink), rank(), world()),
      std::move(options));
}

HandleRef Comm::broadcast(const View& tensor, int root, IssueOptions options) {
  expect_usable();
  return issue(make_operation({Collective::kBroadcast, {}, root}, {{tensor, tensor}}, nullptr, rank(), world()),
               std::move(options));
}

HandleRef Request::start(IssueOptions options) const {
  comm_->expect_usable();
  options.keepalive.insert(options.keepalive.end(), keepalive_.begin(), keepalive_.end());
  return comm_->issue(std::make_shared<Operation>(*op_), std::move(options));
}

}  // namespace bucketwheel
