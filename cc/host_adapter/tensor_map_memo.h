// The tensor maps of the last launch of a plan, so that the next one encodes none.
//
// CUTLASS encodes a kernel's tensor maps anew for each launch. Of one plan they differ in nothing
// but the addresses: where an address is the same the kept map is copied, else its address is
// replaced, which is a fraction of an encoding.

#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

#include "cc/driver/driver_api.h"

namespace stoneware::host_adapter {

// What cuTensorMapEncodeTiled is given, but for the address.
struct TensorMapShape {
  static constexpr cuuint32_t kMaxRank = 5;

  // Arrays beyond the rank are zero. Throws nothing; `rank` is at most kMaxRank.
  TensorMapShape(CUtensorMapDataType type, cuuint32_t rank, const cuuint64_t* dims,
                 const cuuint64_t* strides, const cuuint32_t* box,
                 const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                 CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2_promotion,
                 CUtensorMapFloatOOBfill fill);
  TensorMapShape() = default;

  bool operator==(const TensorMapShape& other) const;

  std::array<cuuint64_t, kMaxRank> dims{};
  std::array<cuuint64_t, kMaxRank> strides{};
  std::array<cuuint32_t, kMaxRank> box{};
  std::array<cuuint32_t, kMaxRank> element_strides{};
  // type, rank, interleave, swizzle, l2_promotion, fill
  std::array<std::uint32_t, 6> choices{};
};

// Not safe for threads: of one plan, used by one thread at a time.
class TensorMapMemo {
 public:
  // While it lives, the encodings of this thread go by the memo, in the order in which they come:
  // the first to its first map, and so on.
  class Use {
   public:
    explicit Use(TensorMapMemo& memo) : outer_(current_) {
      memo.next_ = 0;
      current_ = &memo;
    }
    ~Use() { current_ = outer_; }

    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    TensorMapMemo* const outer_;
  };

  // The memo in use in this thread, or nullptr.
  static TensorMapMemo* Current() { return current_; }

  // Fills *map and returns true if the next map was kept and has this shape. Goes on to the map
  // after it either way; Keep() is about the one that Fill() was asked for last.
  bool Fill(const driver::DriverApi& api, const TensorMapShape& shape, void* address,
            CUtensorMap* map);

  void Keep(const TensorMapShape& shape, void* address, const CUtensorMap& map);

 private:
  // More than any kernel here has: operands, result, scales.
  static constexpr int kMaxMaps = 8;

  struct Kept {
    CUtensorMap map;
    TensorMapShape shape;
    void* address = nullptr;
    bool is_set = false;
  };

  static thread_local TensorMapMemo* current_;

  std::array<Kept, kMaxMaps> kept_;
  int next_ = 0;
};

}  // namespace stoneware::host_adapter
