// wgmma of Hopper: a warp group multiplies 64 rows by n columns, both operands in shared memory.
//
//   sums[64, n] = scale_d * sums[64, n] + a[64, k] * b[n, k]^T,   k = 32 bytes
//
//   a, b      fp8 (e4m3 and e5m2, also mixed), bf16 or fp16; k runs fastest, in swizzle atoms of 8
//             rows x 128 bytes, as TMA writes them. Of bf16 the rows may run fastest: an atom is 8
//             of k x 64 rows or, with half the swizzle, 32
//   sums      fp32, n / 2 in each of 128 threads: of each 64 x 8 block, at 4 * block, columns
//             2 * (lane % 4) and the next of row 16 * warp + lane / 4, then of the row 8 later (PTX
//             ISA, "wgmma: Register Fragments and Shared Memory Matrix Layouts", accumulator D)

#pragma once

#include <cstdint>

#include "cc/gemm/config.h"
#include "cc/gemm/ptx_sm90.cuh"

namespace stoneware::gemm::sm90 {

// Bytes of k of one wgmma.
inline constexpr int kWgmmaBytes = 32;

// What a matrix descriptor counts.
inline constexpr int kDescriptorBytes = 16;

// Needed before the first wgmma that reads registers: makes writes to them visible to it.
__device__ __forceinline__ void FenceWgmma() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Makes one group of all wgmma since the last one.
__device__ __forceinline__ void CommitWgmma() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits for all groups but the last kNumLeft.
template <int kNumLeft>
__device__ __forceinline__ void WaitForWgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNumLeft) : "memory");
}

// wgmma writes the sums without the compiler's knowledge: no read or write of them may be moved
// across this.
template <int kSteps, int kSums>
__device__ __forceinline__ void FenceSums(float (&sums)[kSteps][kSums]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(sums[step][i])::"memory");
  }
}

// Where an operand is in shared memory (PTX ISA, "Matrix Descriptor Format"), from a multiple of
// 1024 bytes on, in lines with a swizzle as wide as they are. Addresses and offsets count 16 bytes.
// If k runs fastest, a line has 128 bytes of k of a row, and `contiguous_rows` is 0. If rows run
// fastest, a line has 64 or 32 of them, `contiguous_rows`: these have 64 of k, line after line,
// then come the next rows.
__device__ __forceinline__ std::uint64_t OperandDescriptor(const void* shared,
                                                           int contiguous_rows = 0) {
  // To the next rows; if k runs fastest it means nothing.
  const std::uint64_t leading_offset =
      std::uint64_t{contiguous_rows > 0 ? contiguous_rows * 128u / kDescriptorBytes : 1u} << 16;
  const unsigned line_bytes = contiguous_rows > 0 ? contiguous_rows * 2u : 128u;
  const std::uint64_t lines_offset =  // to the next 8 lines
      std::uint64_t{8 * line_bytes / kDescriptorBytes} << 32;
  const std::uint64_t swizzle = std::uint64_t{line_bytes == 128 ? 1u : 2u} << 62;
  return (SharedAddress(shared) >> 4 & 0x3fff) | leading_offset | lines_offset | swizzle;
}

// From one wgmma's operand to the next along k, as a descriptor counts: within the lines, or 16 of
// them (of 16-bit elements).
constexpr int WgmmaOffset(int contiguous_rows) {
  return (contiguous_rows > 0 ? 16 * contiguous_rows * 2 : kWgmmaBytes) / kDescriptorBytes;
}

// The descriptor of what lies `offset` * 16 bytes later. The sum does not leave the address's half,
// so adding 32 bits is enough.
__device__ __forceinline__ std::uint64_t Advance(std::uint64_t descriptor, int offset) {
  union {
    std::uint64_t whole;
    std::uint32_t halves[2];
  } from, to;
  from.whole = descriptor;
  to.whole = 0;
  to.halves[0] = from.halves[0] + static_cast<std::uint32_t>(offset);
  to.halves[1] = from.halves[1];
  return to.whole;
}

// Wgmma<kA, kB, kColumns, ...>::Multiply(sums, a, b, scale_d): one wgmma with kColumns columns; a
// and b are matrix descriptors, scale_d is 0 or 1. The last two say whether the rows of a, and the
// columns of b, run fastest.
template <DType kA, DType kB, int kColumns, bool kRowsOfA = false, bool kColumnsOfB = false>
struct Wgmma;

// The first N registers of an instruction. One with 8 more columns has four more.
#define STONEWARE_REGISTERS_4 "%0, %1, %2, %3"
#define STONEWARE_REGISTERS_8 STONEWARE_REGISTERS_4 ", %4, %5, %6, %7"
#define STONEWARE_REGISTERS_12 STONEWARE_REGISTERS_8 ", %8, %9, %10, %11"
#define STONEWARE_REGISTERS_16 STONEWARE_REGISTERS_12 ", %12, %13, %14, %15"
#define STONEWARE_REGISTERS_20 STONEWARE_REGISTERS_16 ", %16, %17, %18, %19"
#define STONEWARE_REGISTERS_24 STONEWARE_REGISTERS_20 ", %20, %21, %22, %23"
#define STONEWARE_REGISTERS_28 STONEWARE_REGISTERS_24 ", %24, %25, %26, %27"
#define STONEWARE_REGISTERS_32 STONEWARE_REGISTERS_28 ", %28, %29, %30, %31"
#define STONEWARE_REGISTERS_36 STONEWARE_REGISTERS_32 ", %32, %33, %34, %35"
#define STONEWARE_REGISTERS_40 STONEWARE_REGISTERS_36 ", %36, %37, %38, %39"
#define STONEWARE_REGISTERS_44 STONEWARE_REGISTERS_40 ", %40, %41, %42, %43"
#define STONEWARE_REGISTERS_48 STONEWARE_REGISTERS_44 ", %44, %45, %46, %47"
#define STONEWARE_REGISTERS_52 STONEWARE_REGISTERS_48 ", %48, %49, %50, %51"
#define STONEWARE_REGISTERS_56 STONEWARE_REGISTERS_52 ", %52, %53, %54, %55"
#define STONEWARE_REGISTERS_60 STONEWARE_REGISTERS_56 ", %56, %57, %58, %59"
#define STONEWARE_REGISTERS_64 STONEWARE_REGISTERS_60 ", %60, %61, %62, %63"
#define STONEWARE_REGISTERS_68 STONEWARE_REGISTERS_64 ", %64, %65, %66, %67"
#define STONEWARE_REGISTERS_72 STONEWARE_REGISTERS_68 ", %68, %69, %70, %71"
#define STONEWARE_REGISTERS_76 STONEWARE_REGISTERS_72 ", %72, %73, %74, %75"
#define STONEWARE_REGISTERS_80 STONEWARE_REGISTERS_76 ", %76, %77, %78, %79"
#define STONEWARE_REGISTERS_84 STONEWARE_REGISTERS_80 ", %80, %81, %82, %83"
#define STONEWARE_REGISTERS_88 STONEWARE_REGISTERS_84 ", %84, %85, %86, %87"
#define STONEWARE_REGISTERS_92 STONEWARE_REGISTERS_88 ", %88, %89, %90, %91"
#define STONEWARE_REGISTERS_96 STONEWARE_REGISTERS_92 ", %92, %93, %94, %95"
#define STONEWARE_REGISTERS_100 STONEWARE_REGISTERS_96 ", %96, %97, %98, %99"
#define STONEWARE_REGISTERS_104 STONEWARE_REGISTERS_100 ", %100, %101, %102, %103"
#define STONEWARE_REGISTERS_108 STONEWARE_REGISTERS_104 ", %104, %105, %106, %107"
#define STONEWARE_REGISTERS_112 STONEWARE_REGISTERS_108 ", %108, %109, %110, %111"
#define STONEWARE_REGISTERS_116 STONEWARE_REGISTERS_112 ", %112, %113, %114, %115"
#define STONEWARE_REGISTERS_120 STONEWARE_REGISTERS_116 ", %116, %117, %118, %119"
#define STONEWARE_REGISTERS_124 STONEWARE_REGISTERS_120 ", %120, %121, %122, %123"
#define STONEWARE_REGISTERS_128 STONEWARE_REGISTERS_124 ", %124, %125, %126, %127"

// The operands that these registers are.
#define STONEWARE_SUMS_AT(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define STONEWARE_SUMS_4 STONEWARE_SUMS_AT(0)
#define STONEWARE_SUMS_8 STONEWARE_SUMS_4, STONEWARE_SUMS_AT(4)
#define STONEWARE_SUMS_12 STONEWARE_SUMS_8, STONEWARE_SUMS_AT(8)
#define STONEWARE_SUMS_16 STONEWARE_SUMS_12, STONEWARE_SUMS_AT(12)
#define STONEWARE_SUMS_20 STONEWARE_SUMS_16, STONEWARE_SUMS_AT(16)
#define STONEWARE_SUMS_24 STONEWARE_SUMS_20, STONEWARE_SUMS_AT(20)
#define STONEWARE_SUMS_28 STONEWARE_SUMS_24, STONEWARE_SUMS_AT(24)
#define STONEWARE_SUMS_32 STONEWARE_SUMS_28, STONEWARE_SUMS_AT(28)
#define STONEWARE_SUMS_36 STONEWARE_SUMS_32, STONEWARE_SUMS_AT(32)
#define STONEWARE_SUMS_40 STONEWARE_SUMS_36, STONEWARE_SUMS_AT(36)
#define STONEWARE_SUMS_44 STONEWARE_SUMS_40, STONEWARE_SUMS_AT(40)
#define STONEWARE_SUMS_48 STONEWARE_SUMS_44, STONEWARE_SUMS_AT(44)
#define STONEWARE_SUMS_52 STONEWARE_SUMS_48, STONEWARE_SUMS_AT(48)
#define STONEWARE_SUMS_56 STONEWARE_SUMS_52, STONEWARE_SUMS_AT(52)
#define STONEWARE_SUMS_60 STONEWARE_SUMS_56, STONEWARE_SUMS_AT(56)
#define STONEWARE_SUMS_64 STONEWARE_SUMS_60, STONEWARE_SUMS_AT(60)
#define STONEWARE_SUMS_68 STONEWARE_SUMS_64, STONEWARE_SUMS_AT(64)
#define STONEWARE_SUMS_72 STONEWARE_SUMS_68, STONEWARE_SUMS_AT(68)
#define STONEWARE_SUMS_76 STONEWARE_SUMS_72, STONEWARE_SUMS_AT(72)
#define STONEWARE_SUMS_80 STONEWARE_SUMS_76, STONEWARE_SUMS_AT(76)
#define STONEWARE_SUMS_84 STONEWARE_SUMS_80, STONEWARE_SUMS_AT(80)
#define STONEWARE_SUMS_88 STONEWARE_SUMS_84, STONEWARE_SUMS_AT(84)
#define STONEWARE_SUMS_92 STONEWARE_SUMS_88, STONEWARE_SUMS_AT(88)
#define STONEWARE_SUMS_96 STONEWARE_SUMS_92, STONEWARE_SUMS_AT(92)
#define STONEWARE_SUMS_100 STONEWARE_SUMS_96, STONEWARE_SUMS_AT(96)
#define STONEWARE_SUMS_104 STONEWARE_SUMS_100, STONEWARE_SUMS_AT(100)
#define STONEWARE_SUMS_108 STONEWARE_SUMS_104, STONEWARE_SUMS_AT(104)
#define STONEWARE_SUMS_112 STONEWARE_SUMS_108, STONEWARE_SUMS_AT(108)
#define STONEWARE_SUMS_116 STONEWARE_SUMS_112, STONEWARE_SUMS_AT(112)
#define STONEWARE_SUMS_120 STONEWARE_SUMS_116, STONEWARE_SUMS_AT(116)
#define STONEWARE_SUMS_124 STONEWARE_SUMS_120, STONEWARE_SUMS_AT(120)
#define STONEWARE_SUMS_128 STONEWARE_SUMS_124, STONEWARE_SUMS_AT(124)

// `kind` is the instruction's name from the columns on, `factors` what follows scale_d: the signs
// of a and b and, of 16 bits, whether they are not K-major. Operand `registers` is a, the first one
// after the registers; then come b and scale_d.
#define STONEWARE_WGMMA_OF(columns, registers, b_operand, scale, kind, factors)              \
  asm volatile(                                                                              \
      "{\n"                                                                                  \
      ".reg .pred adds;\n"                                                                   \
      "setp.ne.b32 adds, %" #scale                                                           \
      ", 0;\n"                                                                               \
      "wgmma.mma_async.sync.aligned.m64n" #columns kind " {" STONEWARE_REGISTERS_##registers \
      "}, %" #registers ", %" #b_operand ", adds, " factors                                  \
      ";\n"                                                                                  \
      "}\n"                                                                                  \
      : STONEWARE_SUMS_##registers                                                           \
      : "l"(a), "l"(b), "r"(scale_d))

#define STONEWARE_WGMMA_BF16(columns, registers, b_operand, scale, majors) \
  STONEWARE_WGMMA_OF(columns, registers, b_operand, scale, "k16.f32.bf16.bf16", "1, 1, " majors)

#define STONEWARE_WGMMA(columns, registers, b_operand, scale)                                      \
  template <DType kA, DType kB, bool kRowsOfA, bool kColumnsOfB>                                   \
  struct Wgmma<kA, kB, columns, kRowsOfA, kColumnsOfB> {                                           \
    static __device__ __forceinline__ void Multiply(float (&sums)[registers], std::uint64_t a,     \
                                                    std::uint64_t b, int scale_d) {                \
      constexpr bool kIsE4M3[2] = {kA == DType::kE4M3, kB == DType::kE4M3};                        \
      constexpr bool kIsE5M2[2] = {kA == DType::kE5M2, kB == DType::kE5M2};                        \
      constexpr bool kIsPlain = !kRowsOfA && !kColumnsOfB;                                         \
      static_assert(kIsPlain || kA == DType::kBF16, "others have k fastest");                      \
      if constexpr (kIsE4M3[0] && kIsE4M3[1]) {                                                    \
        STONEWARE_WGMMA_OF(columns, registers, b_operand, scale, "k32.f32.e4m3.e4m3", "1, 1");     \
      } else if constexpr (kIsE4M3[0] && kIsE5M2[1]) {                                             \
        STONEWARE_WGMMA_OF(columns, registers, b_operand, scale, "k32.f32.e4m3.e5m2", "1, 1");     \
      } else if constexpr (kIsE5M2[0] && kIsE4M3[1]) {                                             \
        STONEWARE_WGMMA_OF(columns, registers, b_operand, scale, "k32.f32.e5m2.e4m3", "1, 1");     \
      } else if constexpr (kIsE5M2[0] && kIsE5M2[1]) {                                             \
        STONEWARE_WGMMA_OF(columns, registers, b_operand, scale, "k32.f32.e5m2.e5m2", "1, 1");     \
      } else if constexpr (kA == DType::kBF16) {                                                   \
        static_assert(kA == kB, "operands of 16 bits have one dtype");                             \
        if constexpr (kIsPlain) {                                                                  \
          STONEWARE_WGMMA_BF16(columns, registers, b_operand, scale, "0, 0");                      \
        } else if constexpr (!kRowsOfA) {                                                          \
          STONEWARE_WGMMA_BF16(columns, registers, b_operand, scale, "0, 1");                      \
        } else if constexpr (!kColumnsOfB) {                                                       \
          STONEWARE_WGMMA_BF16(columns, registers, b_operand, scale, "1, 0");                      \
        } else {                                                                                   \
          STONEWARE_WGMMA_BF16(columns, registers, b_operand, scale, "1, 1");                      \
        }                                                                                          \
      } else {                                                                                     \
        static_assert(kA == DType::kFP16 && kA == kB, "operands of 16 bits have one dtype");       \
        STONEWARE_WGMMA_OF(columns, registers, b_operand, scale, "k16.f32.f16.f16", "1, 1, 0, 0"); \
      }                                                                                            \
    }                                                                                              \
  }

STONEWARE_WGMMA(8, 4, 5, 6);
STONEWARE_WGMMA(16, 8, 9, 10);
STONEWARE_WGMMA(24, 12, 13, 14);
STONEWARE_WGMMA(32, 16, 17, 18);
STONEWARE_WGMMA(40, 20, 21, 22);
STONEWARE_WGMMA(48, 24, 25, 26);
STONEWARE_WGMMA(56, 28, 29, 30);
STONEWARE_WGMMA(64, 32, 33, 34);
STONEWARE_WGMMA(72, 36, 37, 38);
STONEWARE_WGMMA(80, 40, 41, 42);
STONEWARE_WGMMA(88, 44, 45, 46);
STONEWARE_WGMMA(96, 48, 49, 50);
STONEWARE_WGMMA(104, 52, 53, 54);
STONEWARE_WGMMA(112, 56, 57, 58);
STONEWARE_WGMMA(120, 60, 61, 62);
STONEWARE_WGMMA(128, 64, 65, 66);
STONEWARE_WGMMA(136, 68, 69, 70);
STONEWARE_WGMMA(144, 72, 73, 74);
STONEWARE_WGMMA(152, 76, 77, 78);
STONEWARE_WGMMA(160, 80, 81, 82);
STONEWARE_WGMMA(168, 84, 85, 86);
STONEWARE_WGMMA(176, 88, 89, 90);
STONEWARE_WGMMA(184, 92, 93, 94);
STONEWARE_WGMMA(192, 96, 97, 98);
STONEWARE_WGMMA(200, 100, 101, 102);
STONEWARE_WGMMA(208, 104, 105, 106);
STONEWARE_WGMMA(216, 108, 109, 110);
STONEWARE_WGMMA(224, 112, 113, 114);
STONEWARE_WGMMA(232, 116, 117, 118);
STONEWARE_WGMMA(240, 120, 121, 122);
STONEWARE_WGMMA(248, 124, 125, 126);
STONEWARE_WGMMA(256, 128, 129, 130);

#undef STONEWARE_WGMMA
#undef STONEWARE_WGMMA_BF16

}  // namespace stoneware::gemm::sm90
