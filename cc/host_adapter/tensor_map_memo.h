// The tensor maps of the last launch of a plan, so that the next one encodes none.
//
// CUTLASS encodes a kernel's tensor maps anew for each launch. The maps of one plan differ only in
// their addresses: if an address is unchanged, the kept map is copied, otherwise its address is
// replaced, which takes a fraction of an encoding.

#pragma once

#include <cuda.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "cc/driver/driver_api.h"

namespace stoneware::host_adapter {

// The arguments of cuTensorMapEncodeTiled except the address: the choices, and four words for each
// dimension, which are 0 beyond the rank.
struct TensorMapShape {
  static constexpr cuuint32_t kMaxRank = 5;

  bool operator==(const TensorMapShape& other) const {
    // The memcmp that zig links compares byte by byte.
    std::uint64_t difference = 0;
    for (std::size_t i = 0; i < words.size(); ++i) difference |= words[i] ^ other.words[i];
    return difference == 0;
  }

  std::array<std::uint64_t, 6 + 4 * kMaxRank> words;
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

  struct Kept {
    // Fills *map and returns true if a map of this shape is kept.
    bool Fill(const driver::DriverApi& api, const TensorMapShape& wanted, void* wanted_address,
              CUtensorMap* filled);

    CUtensorMap map;
    TensorMapShape shape;
    void* address;
    bool is_set = false;
  };

  // The slot of the next map in the memo that this thread uses; nullptr without a memo or if it is
  // full.
  static Kept* Next() {
    const bool has_next = current_ != nullptr && current_->next_ < kMaxMaps;
    return has_next ? &current_->kept_[current_->next_++] : nullptr;
  }

 private:
  // More than any kernel here has: operands, result, scales.
  static constexpr int kMaxMaps = 8;

  static thread_local TensorMapMemo* current_;

  std::array<Kept, kMaxMaps> kept_;
  int next_ = 0;
};

// What stands behind the cuTensorMapEncodeTiled that CUTLASS looks up: the driver's, by way of the
// memo in use, if there is one. Throws driver::DriverError where the driver refuses: CUTLASS would
// print to stderr and launch with an empty tensor map. It returns nothing but success.
decltype(::cuTensorMapEncodeTiled) EncodeTiled;

}  // namespace stoneware::host_adapter
