#include <algorithm>

#include "check.cuh"
#include "heterps/route.cuh"
#include "heterps/route.h"

namespace heterps {
namespace {

int64_t tiles_of(int64_t pairs) { return std::max<int64_t>(1, (pairs + kTile - 1) / kTile); }

}  // namespace

int64_t route_workspace(int64_t pairs, int64_t experts) { return experts * tiles_of(pairs); }

void route_cuda(const RouteArgs& args, int64_t* workspace, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const int64_t pairs = args.tokens * args.k;
  if (pairs == 0) {
    check_cuda(cudaMemsetAsync(args.offsets, 0, (args.experts + 1) * sizeof(int64_t), stream),
               "route: offsets");
    return;
  }
  const int64_t tiles = tiles_of(pairs);
  const int64_t tokens_in_block = kTile / kWarp;
  const auto token_blocks =
      static_cast<unsigned>((args.tokens + tokens_in_block - 1) / tokens_in_block);
  route_top_k_kernel<<<token_blocks, kTile, 0, stream>>>(args.logits, args.tokens,
                                                         static_cast<int32_t>(args.experts),
                                                         static_cast<int32_t>(args.k), args.chosen);
  check_cuda(cudaMemsetAsync(workspace, 0, args.experts * tiles * sizeof(int64_t), stream),
             "route: counts");
  route_count_kernel<<<static_cast<unsigned>(tiles), kTile, 0, stream>>>(args.chosen, pairs,
                                                                         workspace);
  route_scan_kernel<<<static_cast<unsigned>(args.experts), kScanThreads, 0, stream>>>(
      workspace, tiles, args.offsets);
  route_offsets_kernel<<<1, kScanThreads, 0, stream>>>(args.experts, args.offsets);
  route_scatter_kernel<<<static_cast<unsigned>(tiles), kTile, 0, stream>>>(
      args.chosen, pairs, workspace, args.offsets, args.order, args.inverse);
  check_cuda(cudaGetLastError(), "route");
}

}  // namespace heterps
