// Included before every source of cuda_library: CUDA's words for clang, which compiles the source
// as CUDA for the host alone, without nvcc and without device code.
//
// CUDA's headers are read as they show themselves to a C++ compiler. Then come the words that they
// keep for nvcc: what marks a function, which for a host that launches through the driver all mean
// "host, too", and the device's functions that CUTLASS 4.2 and ours name outside of what depends on
// a template's arguments. None of these is ever called: one that is, is an undefined symbol at link
// time. Another version of CUTLASS may name others, and fail to compile until they stand here.

#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>

#undef __device__
#undef __host__
#undef __global__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#define __device__ __attribute__((host, device))
#define __host__ __attribute__((host))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))

extern const uint3 threadIdx;
extern const uint3 blockIdx;
extern const dim3 blockDim;
extern const dim3 gridDim;

void __syncthreads();
int __syncthreads_and(int predicate);
void __syncwarp(unsigned mask = 0xffffffff);
void __threadfence();
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32);
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32);
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32);
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32);
template <class T>
T atomicAdd(T* address, T value);
template <class T>
T atomicCAS(T* address, T compare, T value);
int __ffs(int value);
unsigned __byte_perm(unsigned x, unsigned y, unsigned selector);
unsigned __umulhi(unsigned x, unsigned y);
int __dp4a(int a, int b, int c);
__half2 __hfma2(__half2 a, __half2 b, __half2 c);
__half2 __hsub2(__half2 a, __half2 b);

// What clang makes of kernel<<<...>>>, which CUTLASS has in functions that are not called.
extern "C" unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared_bytes = 0,
                                                CUstream_st* stream = nullptr);

// From here on headers show what they have for nvcc, CUTLASS's and the one of warp matrices.
#define __CUDACC__
#include <mma.h>
