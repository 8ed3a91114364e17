#include "cc/host_adapter/tensor_map_memo.h"

#include <initializer_list>
#include <string>

namespace stoneware::host_adapter {

thread_local TensorMapMemo* TensorMapMemo::current_ = nullptr;

bool TensorMapMemo::Kept::Fill(const driver::DriverApi& api, const TensorMapShape& wanted,
                               void* wanted_address, CUtensorMap* filled) {
  if (!is_set || !(shape == wanted)) return false;
  if (address != wanted_address) {
    // What the driver refuses is encoded, whose error says more.
    is_set = api.cuTensorMapReplaceAddress(&map, wanted_address) == CUDA_SUCCESS;
    if (!is_set) return false;
    address = wanted_address;
  }
  *filled = map;
  return true;
}

CUresult EncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                     const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                     const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                     CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2_promotion,
                     CUtensorMapFloatOOBfill fill) {
  constexpr cuuint32_t kMaxRank = TensorMapShape::kMaxRank;
  const driver::DriverApi& api = driver::DriverApi::Get();
  const bool has_shape = rank >= 1 && rank <= kMaxRank;  // otherwise the driver refuses it
  TensorMapMemo::Kept* kept = has_shape ? TensorMapMemo::Next() : nullptr;
  TensorMapShape shape;
  if (kept != nullptr) {
    std::uint64_t* word = shape.words.data();
    for (const std::uint64_t choice : std::initializer_list<std::uint64_t>{
             type, rank, interleave, swizzle, l2_promotion, fill}) {
      *word++ = choice;
    }
    for (cuuint32_t i = 0; i < kMaxRank; ++i) {
      *word++ = i < rank ? dims[i] : 0;
      *word++ = i + 1 < rank ? strides[i] : 0;  // the innermost one is implied
      *word++ = i < rank ? box[i] : 0;
      *word++ = i < rank ? element_strides[i] : 0;
    }
    if (kept->Fill(api, shape, address, map)) return CUDA_SUCCESS;
  }
  const CUresult result =
      api.cuTensorMapEncodeTiled(map, type, rank, address, dims, strides, box, element_strides,
                                 interleave, swizzle, l2_promotion, fill);
  driver::CheckWhile("cuTensorMapEncodeTiled", result, [&] {
    std::string text = "describing a tensor of extents";
    for (cuuint32_t i = 0; i < rank; ++i) text += " " + std::to_string(dims[i]);
    text += ", strides";
    for (cuuint32_t i = 0; i + 1 < rank; ++i) text += " " + std::to_string(strides[i]);
    text += " bytes and box";
    for (cuuint32_t i = 0; i < rank; ++i) text += " " + std::to_string(box[i]);
    return text + " at address " + std::to_string(reinterpret_cast<std::uintptr_t>(address)) +
           " (address and strides must be multiples of 16 bytes)";
  });
  if (kept != nullptr) *kept = {*map, shape, address, true};
  return result;
}

}  // namespace stoneware::host_adapter
