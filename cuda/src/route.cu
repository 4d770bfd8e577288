#include <algorithm>

#include "check.cuh"
#include "heterps/route.cuh"
#include "heterps/route.h"

namespace heterps {
namespace {

int64_t tiles_of(int64_t pairs) { return std::max<int64_t>(1, (pairs + kTile - 1) / kTile); }

}  // namespace

void choose_cuda(const Choice& choice, void* stream) {
  if (choice.tokens == 0) return;
  constexpr int64_t kTokensInBlock = kTile / kWarp;
  const auto blocks = static_cast<unsigned>((choice.tokens + kTokensInBlock - 1) / kTokensInBlock);
  route_top_k_kernel<<<blocks, kTile, 0, static_cast<cudaStream_t>(stream)>>>(
      choice.logits, choice.tokens, static_cast<int32_t>(choice.experts),
      static_cast<int32_t>(choice.k), choice.chosen);
  check_cuda(cudaGetLastError(), "route: choice");
}

int64_t group_workspace(int64_t pairs, int64_t experts) { return experts * tiles_of(pairs); }

void group_cuda(const Grouping& grouping, int64_t* workspace, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const auto [chosen, pairs, experts, order, inverse, offsets] = grouping;
  if (pairs == 0) {
    check_cuda(cudaMemsetAsync(offsets, 0, (experts + 1) * sizeof(int64_t), stream),
               "route: offsets");
    return;
  }
  const int64_t tiles = tiles_of(pairs);
  const auto blocks = static_cast<unsigned>(tiles);
  check_cuda(cudaMemsetAsync(workspace, 0, experts * tiles * sizeof(int64_t), stream),
             "route: counts");
  route_count_kernel<<<blocks, kTile, 0, stream>>>(chosen, pairs, workspace);
  route_scan_kernel<<<static_cast<unsigned>(experts), kScanThreads, 0, stream>>>(workspace, tiles,
                                                                                 offsets);
  route_offsets_kernel<<<1, kScanThreads, 0, stream>>>(experts, offsets);
  route_scatter_kernel<<<blocks, kTile, 0, stream>>>(chosen, pairs, workspace, offsets, order,
                                                     inverse);
  check_cuda(cudaGetLastError(), "route");
}

}  // namespace heterps
