// The epilogue of an open kernel: device functions that are linked after the kernel was compiled.
//
//   d[m, n] = epilogue(scales and bias applied to the sums of m and n, m, n, parameters)
//
// A kernel of Config is closed, and a kernel of Open<Config> is open: it is compiled to LTO-IR, and
// calls stoneware_epilogue and stoneware_prefetch without a definition. nvJitLink links definitions
// into it and inlines the calls. With an epilogue that returns its values, and a prefetch that does
// nothing, the machine code is that of the closed kernel (tests/open_kernels).
//
// What stoneware_epilogue must expect:
//   - All threads of a warp call it together: it may shuffle.
//   - It gets each value of d. It also gets values of rows from `m_end` on and of columns from
//     `n_end` on: they are meaningless, and no memory must be read or written for them.
//   - The order of calls is undefined. At the ends of m and n some values are in several tiles
//     (persistent_mm_sm90.h): it gets them several times, bitwise the same.
//   - Pairs mostly come in fragments of 16 x 16 elements: four calls, one after the other, with
//     slots 0 to 3. Slot 2 * i + j has 8 x 8 elements: those 8 * i further along the columns of the
//     accumulators and 8 * j along their rows. Lane l has row l / 4 and columns 2 * (l % 4) and one
//     more. Accumulators' columns run along n, or with is_along_m along m.
//   - What it puts in the state is there in the next calls of the same thread, up to and including
//     the one with is_last of the same rows, the first of which had is_first.

#pragma once

namespace stoneware::gemm::sm90 {

// The position of two neighbours in d.
struct EpiloguePair {
  int m;            // of the first
  int n;            // of the first
  bool is_along_m;  // the second is [m + 1, n]; otherwise it is [m, n + 1]
  int m_end;        // one past the last row of d, of the group, or of an odd tile
  int n_end;        // the columns of d
  int group;        // of grouped_mm; otherwise 0
  int slot;         // in the fragment; -1 without one
  bool is_first;    // in the first fragment of these rows of the accumulators, in this tile
  bool is_last;     // in the last
};

// What an epilogue keeps from call to call: registers, and only those that it uses.
struct EpilogueState {
  static constexpr int kWords = 64;

  unsigned words[kWords];
};

// A tile of d that the block is about to multiply. What the epilogue will read of it can be
// prefetched meanwhile: share `thread` of `num_threads` of it by each thread that calls.
struct EpilogueTile {
  int m;  // of the first row
  int n;
  int rows;
  int columns;
  int m_end;  // as in EpiloguePair
  int n_end;
  int thread;
  int num_threads;
};

// What the host passes to the epilogue: any bytes. They are part of the kernel's parameter, which
// each launch and each node of a CUDA graph copies. A variable of the epilogue's module would be
// shared by all launches.
struct alignas(64) EpilogueParams {
  static constexpr int kBytes = 512;

  unsigned char bytes[kBytes];
};

extern "C" __device__ float2 stoneware_epilogue(float2 values, EpiloguePair pair,
                                                EpilogueState* state, const EpilogueParams* params);

extern "C" __device__ void stoneware_prefetch(EpilogueTile tile, const EpilogueParams* params);

template <class Config>
struct Open : Config {};

template <class Config>
inline constexpr bool kIsOpen = false;

template <class Config>
inline constexpr bool kIsOpen<Open<Config>> = true;

// The only parameter of an open kernel: what the closed one has, and then the epilogue's.
template <class Params>
struct OpenParams : Params {
  EpilogueParams epilogue;
};

// Where a pair is in its fragment and among those of its rows.
struct EpilogueStep {
  int slot;
  bool is_first;
  bool is_last;
};

// The values of a pair, as the epilogue of an open kernel returns them. `params` belongs to an
// OpenParams.
template <class Params>
__device__ __forceinline__ float2 RunEpilogue(float2 values, const EpiloguePair& pair,
                                              EpilogueState& state, const Params& params) {
  static_assert(sizeof(OpenParams<Params>) == sizeof(Params) + sizeof(EpilogueParams),
                "the host appends the epilogue's parameters");
  return stoneware_epilogue(values, pair, &state,
                            &static_cast<const OpenParams<Params>&>(params).epilogue);
}

template <class Params>
__device__ __forceinline__ void RunPrefetch(const EpilogueTile& tile, const Params& params) {
  stoneware_prefetch(tile, &static_cast<const OpenParams<Params>&>(params).epilogue);
}

}  // namespace stoneware::gemm::sm90
