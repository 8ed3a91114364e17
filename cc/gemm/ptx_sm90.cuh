// PTX instructions of sm_90 for which CUDA C++ has no function: barriers in shared memory, TMA,
// clusters, register counts. Each function is one instruction, named after what it does; the PTX
// ISA documents it under the instruction's name.

#pragma once

#include <cuda.h>

#include <cstdint>

namespace stoneware::gemm::sm90 {

// An address in shared memory, as an operand of PTX instructions.
__device__ __forceinline__ std::uint32_t SharedAddress(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}

// Named barriers of the block's threads; barrier 0 is that of __syncthreads. `num_threads` counts
// the threads that arrive and those that wait together.
__device__ __forceinline__ void ArriveAtNamedBarrier(unsigned num_threads, unsigned barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(num_threads));
}

__device__ __forceinline__ void SyncAtNamedBarrier(unsigned num_threads, unsigned barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(num_threads));
}

// The same; returns whether `value` is true for any of the threads.
__device__ __forceinline__ bool AnyAtNamedBarrier(unsigned num_threads, unsigned barrier,
                                                  bool value) {
  int any;
  asm volatile(
      "{\n"
      "  .reg .pred value, any;\n"
      "  setp.ne.s32 value, %3, 0;\n"
      "  barrier.cta.red.or.pred any, %1, %2, value;\n"
      "  selp.s32 %0, 1, 0, any;\n"
      "}"
      : "=r"(any)
      : "r"(barrier), "r"(num_threads), "r"(static_cast<int>(value))
      : "memory");
  return any != 0;
}

// Adds 1, and returns the number before. What threads of this block have written before a barrier
// that this thread has passed is visible to those of a block that finds a larger number later.
__device__ __forceinline__ unsigned CountArrival(unsigned* arrivals) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(arrivals)
               : "memory");
  return before;
}

// Keeps loads and stores of memory on their side of a barrier below, whose instructions name none.
__device__ __forceinline__ void FenceCompiler() { asm volatile("" ::: "memory"); }

// A barrier in shared memory: a phase is complete when all threads and all expected bytes have
// arrived.
class Mbarrier {
 public:
  __device__ __forceinline__ void Init(std::uint32_t num_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%1], %0;" ::"r"(num_arrivals), "r"(Address()));
  }

  __device__ __forceinline__ void Arrive() { ArriveAt(Address()); }

  static __device__ __forceinline__ void ArriveAt(std::uint32_t address) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address));
  }

  // Arrives, and adds bytes to those expected.
  __device__ __forceinline__ void ArriveAndExpect(std::uint32_t num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%1], %0;" ::"r"(num_bytes),
                 "r"(Address()));
  }

  // Arrives once for this thread, when its copies by CopyAsync so far have been written.
  __device__ __forceinline__ void ArriveWhenCopied() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(Address())
                 : "memory");
  }

  // Waits until the phase of this parity is complete. The last operand is the time in nanoseconds
  // for which the hardware may suspend the thread before it polls again.
  __device__ __forceinline__ void Wait(std::uint32_t parity) { WaitAt(Address(), parity); }

  // The same by a barrier's address in shared memory, which a caller may keep.
  static __device__ __forceinline__ void WaitAt(std::uint32_t address, std::uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred is_done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 is_done, [%0], %1, %2;\n"
        "@is_done bra done;\n"
        "bra again;\n"
        "done:\n"
        "}\n" ::"r"(address),
        "r"(parity), "r"(10'000'000));
  }

  // Arrives at a barrier of any block of the cluster.
  static __device__ __forceinline__ void ArriveInClusterAt(std::uint32_t address) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
  }

  // Whether the phase of this parity is complete.
  static __device__ __forceinline__ bool IsCompleteAt(std::uint32_t address, std::uint32_t parity) {
    std::uint32_t is_complete;
    asm volatile(
        "{\n"
        ".reg .pred is_done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 is_done, [%1], %2;\n"
        "selp.b32 %0, 1, 0, is_done;\n"
        "}\n"
        : "=r"(is_complete)
        : "r"(address), "r"(parity)
        : "memory");
    return is_complete != 0;
  }

  // Waits for the first phase, and sees what other blocks of the cluster wrote before.
  __device__ __forceinline__ void WaitForCluster() {
    asm volatile(
        "{\n"
        ".reg .pred is_done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 is_done, [%0], 0;\n"
        "@is_done bra done;\n"
        "bra again;\n"
        "done:\n"
        "}\n" ::"r"(Address())
        : "memory");
  }

  __device__ __forceinline__ std::uint32_t Address() const { return SharedAddress(this); }

 private:
  std::uint64_t state_;
};

// Makes barriers that this thread has initialised visible to the cluster and to TMA.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;");
}

// How L2 keeps the lines of a TMA load: the values of CUTLASS's TMA::CacheHintSm90, made by
// createpolicy.fractional.
enum class CacheHint : std::uint64_t {
  kEvictNormal = 0x1000000000000000,
  kEvictFirst = 0x12F0000000000000,
  kEvictLast = 0x14F0000000000000,
};

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<std::uint64_t>(map)) : "memory");
}

// Loads the box of a tensor map that begins at (x, y) to shared memory; its bytes arrive at
// `barrier`.
__device__ __forceinline__ void LoadBox(const CUtensorMap* map, const Mbarrier* barrier,
                                        CacheHint hint, void* shared, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(SharedAddress(shared)),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(barrier->Address()), "r"(x), "r"(y),
      "l"(static_cast<std::uint64_t>(hint))
      : "memory");
}

// The same to each block of the cluster whose bit is set in `blocks`: to this address in its shared
// memory, and at its barrier there.
__device__ __forceinline__ void LoadBoxToBlocks(const CUtensorMap* map, const Mbarrier* barrier,
                                                CacheHint hint, void* shared, int x, int y,
                                                unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %6, %5;" ::"r"(
          SharedAddress(shared)),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(barrier->Address()), "r"(x), "r"(y),
      "l"(static_cast<std::uint64_t>(hint)), "h"(blocks)
      : "memory");
}

// The same of a tensor of three dimensions.
__device__ __forceinline__ void LoadBox(const CUtensorMap* map, const Mbarrier* barrier,
                                        CacheHint hint, void* shared, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(SharedAddress(shared)),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(barrier->Address()), "r"(x), "r"(y), "r"(z),
      "l"(static_cast<std::uint64_t>(hint))
      : "memory");
}

// Stores the part of a box that lies in the tensor, from shared memory, as a group of its own.
__device__ __forceinline__ void StoreBox(const CUtensorMap* map, std::uint32_t shared, int x,
                                         int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                   reinterpret_cast<std::uint64_t>(map)),
               "r"(shared), "r"(x), "r"(y)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;");
}

// Adds it to the tensor instead, in the tensor map's dtype.
__device__ __forceinline__ void AddBox(const CUtensorMap* map, std::uint32_t shared, int x, int y) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];" ::
          "l"(reinterpret_cast<std::uint64_t>(map)),
      "r"(shared), "r"(x), "r"(y)
      : "memory");
  asm volatile("cp.async.bulk.commit_group;");
}

// Waits until all boxes that this thread stored, except the last kNumLeft, have been read from
// shared memory.
template <int kNumLeft>
__device__ __forceinline__ void WaitForStoredBoxes() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kNumLeft) : "memory");
}

// Makes this thread's writes to shared memory visible to TMA.
__device__ __forceinline__ void FenceSharedForTma() {
  asm volatile("fence.proxy.async.shared::cta;");
}

// Copies 4 bytes to shared memory, or zeros if `is_inside` is false.
__device__ __forceinline__ void CopyAsync(float* shared, const float* global, bool is_inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(SharedAddress(shared)),
               "l"(global), "r"(is_inside ? 4 : 0)
               : "memory");
}

__device__ __forceinline__ void PrefetchToL2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

__device__ __forceinline__ float4 LoadShared(std::uint32_t address) {
  float4 word;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(word.x), "=f"(word.y), "=f"(word.z), "=f"(word.w)
               : "r"(address)
               : "memory");
  return word;
}

__device__ __forceinline__ float2 LoadSharedPair(std::uint32_t address) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(pair.x), "=f"(pair.y)
               : "r"(address)
               : "memory");
  return pair;
}

// Whether this is the one thread of its warp that is elected, always the same. All call together.
// The compiler knows that one thread runs what depends on it, so TMA's operands can be in uniform
// registers; with a comparison of threadIdx.x there is a loop around each instruction of TMA.
__device__ __forceinline__ bool IsElected() {
  std::uint32_t is_elected;
  asm volatile(
      "{\n"
      ".reg .pred is_elected;\n"
      "elect.sync _|is_elected, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, is_elected;\n"
      "}\n"
      : "=r"(is_elected));
  return is_elected != 0;
}

// A value that all threads of a warp have, so that the compiler knows it to be the same.
template <class Value>
__device__ __forceinline__ Value SameInWarp(Value value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

// Like SameInWarp, and certainly in a uniform register. If ptxas (13.0) can prove that a value is
// the same in all lanes, it drops the shuffle and may keep the value in a register of each thread;
// so lanes shuffle different values.
template <class Value>
__device__ __forceinline__ Value InUniformRegister(Value value) {
  return SameInWarp(value + threadIdx.x % 32);
}

// Writes four 8 x 8 matrices of 16-bit elements, held by the threads of a warp in wgmma's layout.
// Lane l gives the address of row l % 8 of matrix l / 8, or with kTransposes of column l % 8.
template <bool kTransposes>
__device__ __forceinline__ void StoreMatrices(std::uint32_t address, const unsigned (&words)[4]) {
  if constexpr (kTransposes) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
        : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  }
}

// Changes the number of registers of each thread of a warp group.
template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The cluster of a block, all of whose blocks lie along x.
__device__ __forceinline__ unsigned BlocksOfCluster() {
  std::uint32_t x;
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(x));
  return x;
}

__device__ __forceinline__ unsigned BlockInCluster() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ unsigned ClusterInGrid() {
  std::uint32_t x;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(x));
  return x;
}

__device__ __forceinline__ unsigned ClustersOfGrid() {
  std::uint32_t x;
  asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(x));
  return x;
}

// Arrives at the cluster's barrier without waiting. All threads of a warp call it together.
__device__ __forceinline__ void ArriveAtCluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;");
}

// Waits until all threads of the cluster have arrived. All threads of a warp call it together.
__device__ __forceinline__ void WaitForClusterToArrive() {
  asm volatile("barrier.cluster.wait.aligned;");
}

// The same for a warp whose threads have diverged.
__device__ __forceinline__ void WaitForClusterToArriveApart() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// The shared memory address of the cluster's block `block` that corresponds to `address` here.
__device__ __forceinline__ std::uint32_t AddressInBlock(std::uint32_t address, int block) {
  std::uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(block));
  return mapped;
}

// Copies bytes of shared memory to that of a block of the cluster; they arrive at its `barrier`.
__device__ __forceinline__ void CopyToBlock(std::uint32_t address, std::uint32_t barrier,
                                            std::uint32_t from, int num_bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(address),
      "r"(from), "r"(num_bytes), "r"(barrier)
      : "memory");
}

// Writes 8 bytes to this block's shared memory.
__device__ __forceinline__ void StoreShared(std::uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

// Writes 16 bytes to this block's shared memory.
__device__ __forceinline__ void StoreShared(std::uint32_t address, float x, float y, float z,
                                            float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x), "f"(y), "f"(z),
               "f"(w)
               : "memory");
}

// Writes 16 bytes to the shared memory of a block of the cluster; they arrive at its `barrier`.
__device__ __forceinline__ void StoreToBlock(std::uint32_t address, std::uint32_t barrier, float x,
                                             float y, float z, float w) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "f"(x), "f"(y), "f"(z), "f"(w), "r"(barrier)
      : "memory");
}

}  // namespace stoneware::gemm::sm90
