// Tiles in shared memory and sums in registers: what a user's kernel and the matmuls that are
// linked into it share.
//
//   forward   c[m, n] += a[m, k] * b[k, n]
//   dA        da[m, k] += dc[m, n] * b^T
//   dB        db[k, n] += a^T * dc[m, n]
//
//   a, b, dc    Tile: in shared memory, in the dtype of the operands
//   c, da, db   Sum: fp32, in the registers of all threads of the block
//
// The file includes nothing, so that NVRTC compiles it without CUDA's headers. docs/tiles.md
// explains its use.

#pragma once

namespace stoneware::tile {

// For assertions, here and in what sw.tile generates.
template <class Left, class Right>
inline constexpr bool kIsSame = false;
template <class Type>
inline constexpr bool kIsSame<Type, Type> = true;

// False, but only known when a template is used: for the assertion of one that must not be.
template <class>
inline constexpr bool kNever = false;

// Elements: the bits of a number, with conversions. Of a Tf32 the tensor cores ignore the last 13
// bits.

struct Bf16 {
  unsigned short bits;
  static __device__ __forceinline__ Bf16 From(float value) {
    Bf16 element;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(element.bits) : "f"(value));
    return element;
  }
  __device__ __forceinline__ operator float() const {
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
  }
};

struct Fp16 {
  unsigned short bits;
  static __device__ __forceinline__ Fp16 From(float value) {
    Fp16 element;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(element.bits) : "f"(value));
    return element;
  }
  __device__ __forceinline__ operator float() const {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
};

// Values beyond the largest number become the largest (PTX ISA, "cvt", .satfinite).
#define STONEWARE_TILE_FP8(Name, kind)                                                         \
  struct Name {                                                                                \
    unsigned char bits;                                                                        \
    static __device__ __forceinline__ Name From(float value) {                                 \
      unsigned short pair;                                                                     \
      asm("cvt.rn.satfinite." kind "x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value)); \
      return {static_cast<unsigned char>(pair)};                                               \
    }                                                                                          \
    __device__ __forceinline__ operator float() const {                                        \
      unsigned pair;                                                                           \
      asm("cvt.rn.f16x2." kind "x2 %0, %1;"                                                    \
          : "=r"(pair)                                                                         \
          : "h"(static_cast<unsigned short>(bits)));                                           \
      return Fp16{static_cast<unsigned short>(pair)};                                          \
    }                                                                                          \
  }

STONEWARE_TILE_FP8(E4m3, "e4m3");
STONEWARE_TILE_FP8(E5m2, "e5m2");

#undef STONEWARE_TILE_FP8

struct Tf32 {
  float value;
  static __device__ __forceinline__ Tf32 From(float value) {
    unsigned rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
    return {__uint_as_float(rounded)};
  }
  __device__ __forceinline__ operator float() const { return value; }
};

// Two neighbours, rounded to 16 bits, in one word.
template <class Element>
__device__ __forceinline__ unsigned Pack(float low, float high) {
  return Element::From(low).bits | static_cast<unsigned>(Element::From(high).bits) << 16;
}

template <>
__device__ __forceinline__ unsigned Pack<Bf16>(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(low), "f"(high));
  return pair;
}

template <>
__device__ __forceinline__ unsigned Pack<Fp16>(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(low), "f"(high));
  return pair;
}

__device__ __forceinline__ unsigned SharedAddress(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// Copies 16 bytes to shared memory: `num_bytes` of them, and zeros for the rest.
__device__ __forceinline__ void CopyAsync(unsigned shared, const void* global, int num_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(num_bytes)
               : "memory");
}

// Makes one group of all copies of this thread since the last group.
__device__ __forceinline__ void CommitLoads() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for this thread's groups of copies, except the last kNumLeft; `Sync` follows, for the other
// threads.
template <int kNumLeft = 0>
__device__ __forceinline__ void WaitForLoads() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNumLeft) : "memory");
}

// All threads of the block wait for each other. Afterwards the matmuls see what was written to
// tiles.
__device__ __forceinline__ void Sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::
                   : "memory");  // wgmma does not read through the generic proxy
#endif
  __syncthreads();
}

// A matrix in shared memory.
//
// A line is contiguous: a row if kIsRowMajor, otherwise a column. Lines are cut into pieces of
// kPieceBytes: 128 if that divides their bytes, else 64, else 32. The first pieces of all lines are
// a slab, then follow the second pieces. Within a slab, units of 16 bytes are swizzled: bits 4 to 6
// of an offset are xor-ed with its bits 7 to 9, as far as they number the units of a piece. So a
// slab is the box of a tensor map with a swizzle of kPieceBytes.
//
// kThreads threads of a block copy a tile together; their threadIdx.x is below kThreads.
template <class ElementType, int kRowsOf, int kColumnsOf, bool kIsRowMajorOf, int kThreads>
struct alignas(1024) Tile {
  using Element = ElementType;
  static constexpr int kRows = kRowsOf;
  static constexpr int kColumns = kColumnsOf;
  static constexpr bool kIsRowMajor = kIsRowMajorOf;

  static constexpr int kLines = kIsRowMajor ? kRows : kColumns;
  static constexpr int kLineBytes =
      (kIsRowMajor ? kColumns : kRows) * static_cast<int>(sizeof(Element));
  static constexpr int kPieceBytes = kLineBytes % 128 == 0 ? 128 : kLineBytes % 64 == 0 ? 64 : 32;
  static constexpr int kSlabBytes = kLines * kPieceBytes;
  static_assert(kLineBytes % 32 == 0 && kLines % 8 == 0);

  // Where byte `byte` of line `line` is, from the tile's address on.
  static __device__ __forceinline__ constexpr int OffsetInLine(int line, int byte) {
    const int offset = line * kPieceBytes + byte % kPieceBytes;
    return byte / kPieceBytes * kSlabBytes + (offset ^ (offset >> 3 & (kPieceBytes - 16)));
  }

  static __device__ __forceinline__ constexpr int Offset(int row, int column) {
    constexpr int kBytes = static_cast<int>(sizeof(Element));
    return kIsRowMajor ? OffsetInLine(row, column * kBytes) : OffsetInLine(column, row * kBytes);
  }

  __device__ __forceinline__ Element& At(int row, int column) {
    return *reinterpret_cast<Element*>(bytes + Offset(row, column));
  }
  __device__ __forceinline__ const Element& At(int row, int column) const {
    return *reinterpret_cast<const Element*>(bytes + Offset(row, column));
  }

  // Begins to copy a matrix from global memory; CommitLoads, WaitForLoads and Sync follow.
  //
  // `stride` counts elements from one line to the next. `global` and the lines begin at multiples
  // of 16 bytes.
  template <class Value>
  __device__ __forceinline__ void Load(const Value* global, long long stride) {
    LoadLines<false>(global, stride, kRows, kColumns);
  }

  // The same for a matrix of fewer rows or columns: the rest of the tile becomes zeros. A count may
  // be zero or negative.
  template <class Value>
  __device__ __forceinline__ void Load(const Value* global, long long stride, int rows,
                                       int columns) {
    LoadLines<true>(global, stride, rows, columns);
  }

  // Copies the tile to global memory, which has the alignment that Load needs; `Sync` comes before.
  template <class Value>
  __device__ __forceinline__ void Store(Value* global, long long stride) const {
    StoreLines<false>(global, stride, kRows, kColumns);
  }

  // The same for the first rows and columns alone.
  template <class Value>
  __device__ __forceinline__ void Store(Value* global, long long stride, int rows,
                                        int columns) const {
    StoreLines<true>(global, stride, rows, columns);
  }

  unsigned char bytes[kLines * kLineBytes];

 private:
  // Chunks of 16 bytes: of a line, of the tile, and of a thread.
  static constexpr int kLineChunks = kLineBytes / 16;
  static constexpr int kChunks = kLines * kLineChunks;
  static constexpr int kThreadChunks = (kChunks + kThreads - 1) / kThreads;
  static constexpr int kChunkElements = 16 / static_cast<int>(sizeof(Element));
  // Whether a thread's chunks are at the same place of lines that are kStepLines apart, so that
  // they need one address.
  static constexpr int kStepLines = kThreads / kLineChunks;
  static constexpr bool kIsRegular =
      kThreads % kLineChunks == 0 && kStepLines % 8 == 0 && kChunks % kThreads == 0;

  // Calls function(offset in the tile, address in the matrix, line, first element of the line) for
  // the chunks of this thread.
  template <class Value, class Function>
  static __device__ __forceinline__ void ForEachChunk(Value* global, long long stride,
                                                      Function function) {
    const int thread = static_cast<int>(threadIdx.x);
    if constexpr (kIsRegular) {
      const int line = thread / kLineChunks;
      const int first = thread % kLineChunks * kChunkElements;
      const int offset = OffsetInLine(line, thread % kLineChunks * 16);
      long long to_chunk = line * stride + first;
      long long step = kStepLines * stride;
      // The compiler does not see through this `asm`. Otherwise it adds these lines to those in the
      // caller's `global` before it multiplies by the stride: a product of 64 bits for each chunk.
      asm("" : "+l"(to_chunk), "+l"(step));
      Value* at = global + to_chunk;
#pragma unroll
      for (int i = 0; i < kThreadChunks; ++i) {
        function(offset + i * kStepLines * kPieceBytes, at, line + i * kStepLines, first);
        at += step;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kThreadChunks; ++i) {
        const int chunk = thread + i * kThreads;
        if ((i + 1) * kThreads > kChunks && chunk >= kChunks) break;
        const int line = chunk / kLineChunks;
        const int first = chunk % kLineChunks * kChunkElements;
        function(OffsetInLine(line, chunk % kLineChunks * 16), global + line * stride + first, line,
                 first);
      }
    }
  }

  template <bool kIsPart, class Value>
  __device__ __forceinline__ void LoadLines(const Value* global, long long stride, int rows,
                                            int columns) {
    static_assert(sizeof(Value) == sizeof(Element),
                  "Load must read elements of the tile's dtype; convert them, or describe the "
                  "matmul with their dtype");
    const int num_lines = kIsRowMajor ? rows : columns;
    const int length = kIsRowMajor ? columns : rows;
    const unsigned address = SharedAddress(bytes);
    ForEachChunk(global, stride, [&](int offset, const Value* from, int line, int first) {
      if constexpr (kIsPart) {
        const int left = line < num_lines ? length - first : 0;
        const int num = left < 0 ? 0 : left < kChunkElements ? left : kChunkElements;
        CopyAsync(address + offset, num ? from : global, num * static_cast<int>(sizeof(Element)));
      } else {
        CopyAsync(address + offset, from, 16);
      }
    });
  }

  template <bool kIsPart, class Value>
  __device__ __forceinline__ void StoreLines(Value* global, long long stride, int rows,
                                             int columns) const {
    static_assert(sizeof(Value) == sizeof(Element),
                  "Store must write elements of the tile's dtype; convert them, or describe the "
                  "matmul with their dtype");
    const int num_lines = kIsRowMajor ? rows : columns;
    const int length = kIsRowMajor ? columns : rows;
    ForEachChunk(global, stride, [&](int offset, Value* target, int line, int first) {
      if constexpr (kIsPart) {
        if (line >= num_lines || first >= length) return;
        if (first + kChunkElements > length) {
          for (int i = 0; first + i < length; ++i)
            target[i] = reinterpret_cast<const Value*>(bytes + offset)[i];
          return;
        }
      }
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(bytes + offset);
    });
  }
};

// Sums of fp32 in registers, of a matrix [rows, columns].
//
// The warps of the block form groups: of four warps if wgmma computes the sums, otherwise of one.
// Groups divide the matrix into kGroupRows x kGroupColumns equal parts; group g has part (g %
// kGroupRows, g / kGroupRows). A part is divided into blocks of 16 rows a warp and 8 columns: of
// each a thread has columns 2 * (lane % 4) and the next of row lane / 4, then of the row 8 later
// (PTX ISA, the accumulators of "mma" and "wgmma"). `Row` and `Column` say which element each value
// is.
template <int kRowsOf, int kColumnsOf, int kGroupWarps, int kGroupRows, int kGroupColumns>
struct Sum {
  static constexpr int kRows = kRowsOf;
  static constexpr int kColumns = kColumnsOf;
  static constexpr int kBlockRows = 16 * kGroupWarps;
  static constexpr int kRowBlocks = kRows / kGroupRows / kBlockRows;
  static constexpr int kPartColumns = kColumns / kGroupColumns;
  static constexpr int kBlockValues = kPartColumns / 2;  // of all blocks of the same rows
  static constexpr int kSize = kRowBlocks * kBlockValues;
  static_assert(kRowBlocks * kBlockRows * kGroupRows == kRows && kPartColumns % 8 == 0);

  static __device__ __forceinline__ int Group() {
    return static_cast<int>(threadIdx.x) / (32 * kGroupWarps);
  }

  // The first row and column of this group's part.
  static __device__ __forceinline__ int FirstRow() {
    return kGroupRows == 1 ? 0 : Group() % kGroupRows * (kRows / kGroupRows);
  }
  static __device__ __forceinline__ int FirstColumn() {
    return kGroupColumns == 1 ? 0 : Group() / kGroupRows * kPartColumns;
  }

  // The row and the column of value `i` of this thread.
  static __device__ __forceinline__ int Row(int i) {
    const int warp = static_cast<int>(threadIdx.x) / 32 % kGroupWarps;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return FirstRow() + 16 * warp + lane / 4 + RowStep(i);
  }
  static __device__ __forceinline__ int Column(int i) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return FirstColumn() + 2 * (lane % 4) + ColumnStep(i);
  }

  __device__ __forceinline__ float& operator[](int i) {
    return values[i / kBlockValues][i % kBlockValues];
  }
  __device__ __forceinline__ float operator[](int i) const {
    return values[i / kBlockValues][i % kBlockValues];
  }

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kBlockValues; ++i) values[block][i] = 0.0f;
    }
  }

  // Calls function(row, column, value) for each value; it may take a reference to the value.
  template <class Function>
  __device__ __forceinline__ void ForEach(Function function) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) function(Row(i), Column(i), (*this)[i]);
  }

  // Rounds the sums to a matrix in global memory, row-major with `stride` elements from one row to
  // the next. Value is float or one of the elements; rows begin at a multiple of two elements.
  template <class Value>
  __device__ __forceinline__ void Store(Value* global, long long stride) const {
    Value* line = global + Row(0) * stride + Column(0);
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 4; half += 2) {
#pragma unroll
        for (int i = half; i < kBlockValues; i += 4) {
          StorePair(line + ColumnStep(i), values[block][i], values[block][i + 1]);
        }
        line += half == 0 ? 8 * stride : (kBlockRows - 8) * stride;
      }
    }
  }

  // The same for the first rows and columns alone.
  template <class Value>
  __device__ __forceinline__ void Store(Value* global, long long stride, int rows,
                                        int columns) const {
    const int row = Row(0);
    const int column = Column(0);
    Value* line = global + row * stride + column;
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 4; half += 2) {
        if (row + block * kBlockRows + half * 4 < rows) {
#pragma unroll
          for (int i = half; i < kBlockValues; i += 4) {
            const int left = columns - column - ColumnStep(i);
            if (left > 1) {
              StorePair(line + ColumnStep(i), values[block][i], values[block][i + 1]);
            } else if (left == 1) {
              line[ColumnStep(i)] = Converted<Value>(values[block][i]);
            }
          }
        }
        line += half == 0 ? 8 * stride : (kBlockRows - 8) * stride;
      }
    }
  }

  // Rounds the sums to a tile of the same size, for example as an operand of the next matmul;
  // `Sync` follows.
  template <class Target>
  __device__ __forceinline__ void Store(Target& tile) const {
    static_assert(
        Target::kRows == kRows && Target::kColumns == kColumns,
        "Store must have a tile with the rows and columns of the sums; pass a tile of that size");
    using Element = typename Target::Element;
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      if constexpr (Target::kIsRowMajor) {
        StorePair(&tile.At(Row(i), Column(i)), (*this)[i], (*this)[i + 1]);
      } else {
        tile.At(Row(i), Column(i)) = Element::From((*this)[i]);
        tile.At(Row(i), Column(i) + 1) = Element::From((*this)[i + 1]);
      }
    }
  }

  // Reads the sums from a matrix like the one that Store writes.
  template <class Value>
  __device__ __forceinline__ void Load(const Value* global, long long stride) {
    const Value* first = global + Row(0) * stride + Column(0);
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      (*this)[i] = static_cast<float>(first[RowStep(i) * stride + ColumnStep(i)]);
  }

  float values[kRowBlocks][kBlockValues];

  // Keeps the compiler from moving a read or a write of the sums across this.
  __device__ __forceinline__ void Settle() {
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kBlockValues; ++i) asm volatile("" : "+f"(values[block][i]));
    }
  }

 private:
  // From value 0 of a thread to value i.
  static __device__ __forceinline__ constexpr int RowStep(int i) {
    return i / kBlockValues * kBlockRows + i % 4 / 2 * 8;
  }
  static __device__ __forceinline__ constexpr int ColumnStep(int i) {
    return i % kBlockValues / 4 * 8 + i % 2;
  }

  template <class Value>
  static __device__ __forceinline__ Value Converted(float value) {
    if constexpr (kIsSame<Value, float>) {
      return value;
    } else {
      return Value::From(value);
    }
  }

  template <class Value>
  static __device__ __forceinline__ void StorePair(Value* target, float first, float second) {
    if constexpr (sizeof(Value) == 2) {
      *reinterpret_cast<unsigned*>(target) = Pack<Value>(first, second);
    } else if constexpr (kIsSame<Value, float>) {
      *reinterpret_cast<float2*>(target) = {first, second};
    } else {
      target[0] = Value::From(first);
      target[1] = Value::From(second);
    }
  }
};

// A tile as an operand: a matmul sums over one of its axes, and keeps the other one, "outer".
template <class TileType, bool kOuterIsRows>
struct Operand {
  using Tile = TileType;
  static constexpr int kOuter = kOuterIsRows ? Tile::kRows : Tile::kColumns;
  static constexpr int kSummed = kOuterIsRows ? Tile::kColumns : Tile::kRows;
  // Whether the summed axis is contiguous.
  static constexpr bool kIsKMajor = kOuterIsRows == Tile::kIsRowMajor;
};

// Waits for all matmuls that were started, except the last kNumLeft, and lets the compiler read
// these sums.
template <int kNumLeft = 0, class SumType>
__device__ __forceinline__ void WaitForMatmuls(SumType& sum) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNumLeft) : "memory");
  sum.Settle();
#endif
}

}  // namespace stoneware::tile
