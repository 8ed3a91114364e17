#include "cc/host_adapter/tensor_map_memo.h"

#include <algorithm>

#include "cc/host_adapter/encode_tiled.h"

namespace stoneware::host_adapter {

thread_local TensorMapMemo* TensorMapMemo::current_ = nullptr;

TensorMapShape::TensorMapShape(CUtensorMapDataType type, cuuint32_t rank, const cuuint64_t* dims,
                               const cuuint64_t* strides, const cuuint32_t* box,
                               const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                               CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2_promotion,
                               CUtensorMapFloatOOBfill fill)
    : choices{static_cast<std::uint32_t>(type),         rank,
              static_cast<std::uint32_t>(interleave),   static_cast<std::uint32_t>(swizzle),
              static_cast<std::uint32_t>(l2_promotion), static_cast<std::uint32_t>(fill)} {
  std::copy_n(dims, rank, this->dims.begin());
  std::copy_n(strides, rank - 1, this->strides.begin());  // the innermost one is implied
  std::copy_n(box, rank, this->box.begin());
  std::copy_n(element_strides, rank, this->element_strides.begin());
}

bool TensorMapShape::operator==(const TensorMapShape& other) const {
  return choices == other.choices && dims == other.dims && strides == other.strides &&
         box == other.box && element_strides == other.element_strides;
}

bool TensorMapMemo::Fill(const driver::DriverApi& api, const TensorMapShape& shape, void* address,
                         CUtensorMap* map) {
  ++next_;
  if (next_ > kMaxMaps) return false;
  Kept& kept = kept_[next_ - 1];
  if (!kept.is_set || !(kept.shape == shape)) return false;
  if (kept.address != address) {
    // What the driver refuses is encoded, whose error says more.
    if (api.cuTensorMapReplaceAddress(&kept.map, address) != CUDA_SUCCESS) {
      kept.is_set = false;
      return false;
    }
    kept.address = address;
  }
  *map = kept.map;
  return true;
}

void TensorMapMemo::Keep(const TensorMapShape& shape, void* address, const CUtensorMap& map) {
  if (next_ < 1 || next_ > kMaxMaps) return;
  Kept& kept = kept_[next_ - 1];
  kept.map = map;
  kept.shape = shape;
  kept.address = address;
  kept.is_set = true;
}

CUresult EncodeTiledByMemo(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                           void* address, const cuuint64_t* dims, const cuuint64_t* strides,
                           const cuuint32_t* box, const cuuint32_t* element_strides,
                           CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion l2_promotion, CUtensorMapFloatOOBfill fill) {
  TensorMapMemo* memo = TensorMapMemo::Current();
  if (memo == nullptr || rank < 1 || rank > TensorMapShape::kMaxRank) {
    return EncodeTiledOrThrow(map, type, rank, address, dims, strides, box, element_strides,
                              interleave, swizzle, l2_promotion, fill);
  }
  const TensorMapShape shape(type, rank, dims, strides, box, element_strides, interleave, swizzle,
                             l2_promotion, fill);
  if (memo->Fill(driver::DriverApi::Get(), shape, address, map)) return CUDA_SUCCESS;
  const CUresult result =
      EncodeTiledOrThrow(map, type, rank, address, dims, strides, box, element_strides, interleave,
                         swizzle, l2_promotion, fill);
  memo->Keep(shape, address, *map);
  return result;
}

}  // namespace stoneware::host_adapter
