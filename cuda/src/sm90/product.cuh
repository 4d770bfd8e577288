// A grouped product by CUTLASS 3: wgmma, operands by TMA, persistent blocks that find their tiles
// in the groups' shapes.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>

#include <cstdint>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "heterps/grouped_product.h"
#include "products.h"

namespace heterps {

// Neighbours that shared an operand would have to be there: alone, a group of few rows or of an odd
// number of tiles loses nothing.
struct Cooperative {
  using Tile = cute::Shape<cute::_128, cute::_256, cute::_64>;
  using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
};
// Two neighbours across share the left operand's tiles.
struct Pingpong {
  using Tile = cute::Shape<cute::_128, cute::_128, cute::_64>;
  using Cluster = cute::Shape<cute::_1, cute::_2, cute::_1>;
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong;
};

template <ProductKind kKind, typename T, typename Tiling>
struct Product {
  template <bool kRowMajor>
  using Layout =
      std::conditional_t<kRowMajor, cutlass::layout::RowMajor, cutlass::layout::ColumnMajor>*;
  using Left = Layout<kKind != ProductKind::kWeights>;
  using Right = Layout<kKind != ProductKind::kTransposed>;
  using Out = Layout<true>;
  static constexpr int kAlignment = 8;  // 16 bytes
  using Tile = typename Tiling::Tile;
  using Cluster = typename Tiling::Cluster;
  using Shapes = cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Out, kAlignment, T, Out,
      kAlignment, typename Tiling::Epilogue>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, T, Left, kAlignment, T, Right,
      kAlignment, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      typename Tiling::Mainloop>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Shapes, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  // A stride is one number: the others are known to the type. So ours can stand for theirs.
  template <typename Stride>
  static Stride* stride(int64_t* pitch) {
    static_assert(sizeof(Stride) == sizeof(int64_t) && std::is_empty_v<cute::Int<1>>);
    return reinterpret_cast<Stride*>(pitch);
  }

  static typename Gemm::Arguments arguments(int64_t groups, const GroupArrays& arrays,
                                            int processors) {
    using Shape = typename Shapes::UnderlyingProblemShape;
    static_assert(sizeof(Shape) == 3 * sizeof(int32_t));
    typename Gemm::Arguments all{
        cutlass::gemm::GemmUniversalMode::kGrouped,
        {static_cast<int>(groups), reinterpret_cast<Shape*>(arrays.shapes), nullptr},
        {reinterpret_cast<const T**>(arrays.left),
         stride<typename Kernel::InternalStrideA>(arrays.left_pitch),
         reinterpret_cast<const T**>(arrays.right),
         stride<typename Kernel::InternalStrideB>(arrays.right_pitch)},
        {{},
         nullptr,
         nullptr,
         reinterpret_cast<T**>(arrays.out),
         stride<typename Kernel::InternalStrideD>(arrays.out_pitch)},
        {0, processors},
        {}};
    all.epilogue.thread.alpha = 1.0f;
    all.epilogue.thread.beta = 0.0f;
    return all;
  }
};

template <ProductKind kKind, typename T, typename Tiling>
size_t product_workspace(int64_t groups, int processors) {
  using P = Product<kKind, T, Tiling>;
  return P::Gemm::get_workspace_size(P::arguments(groups, GroupArrays{}, processors));
}

template <ProductKind kKind, typename T, typename Tiling>
void run_product(int64_t groups, const GroupArrays& arrays, void* workspace, int processors,
                 void* stream) {
  using P = Product<kKind, T, Tiling>;
  const auto queue = static_cast<cudaStream_t>(stream);
  const auto arguments = P::arguments(groups, arrays, processors);
  const auto check = [](cutlass::Status status) {
    if (status == cutlass::Status::kSuccess) return;
    throw std::runtime_error(std::string("grouped product: ") + cutlassGetStatusString(status));
  };
  typename P::Gemm gemm;
  check(P::Gemm::can_implement(arguments));
  check(gemm.initialize(arguments, workspace, queue));
  check(gemm.run(queue));
}

}  // namespace heterps
