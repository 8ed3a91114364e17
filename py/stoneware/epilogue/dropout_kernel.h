// The kernel of sw.dropout outside of an epilogue, behind device_code.h and philox.h. A thread has
// the 4 elements of a counter. x and y are row-major. A seed or an offset is a number, or the
// value at an address.

template <class Dtype>
DEVICE void DropPair(const void* x, void* y, long long at, int count, uint2 random,
                     unsigned threshold, float scale) {
  using Bits = typename Dtype::Bits;
  using Two = typename Dtype::Two;
  const Bits* const from = static_cast<const Bits*>(x) + at;
  Bits* const to = static_cast<Bits*>(y) + at;
  const bool has_two = count >= 2 &&
                       reinterpret_cast<unsigned long long>(from) % sizeof(Two) == 0 &&
                       reinterpret_cast<unsigned long long>(to) % sizeof(Two) == 0;
  float2 values = {0.0f, 0.0f};
  if (has_two) {
    values = Dtype::ToFloats(__ldg(reinterpret_cast<const Two*>(from)));
  } else {
    if (count >= 1) values.x = Dtype::ToFloat(__ldg(from));
    if (count >= 2) values.y = Dtype::ToFloat(__ldg(from + 1));
  }
  values.x = random.x < threshold ? 0.0f : __fmul_rn(values.x, scale);
  values.y = random.y < threshold ? 0.0f : __fmul_rn(values.y, scale);
  if (has_two) {
    *reinterpret_cast<Two*>(to) = Dtype::FromFloats(values.x, values.y);
  } else {
    if (count >= 1) to[0] = Dtype::FromFloat(values.x);
    if (count >= 2) to[1] = Dtype::FromFloat(values.y);
  }
}

template <class Dtype>
DEVICE void Drop(const void* x, void* y, const unsigned long long* seed_address,
                 const unsigned long long* offset_address, unsigned long long seed,
                 unsigned long long offset, long long rows, long long columns, unsigned threshold,
                 float scale) {
  const long long per_row = (columns + 15) / 16 * 4, total = rows * per_row;
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (thread >= total) return;
  const long long row = total >> 32
                            ? thread / per_row
                            : static_cast<unsigned>(thread) / static_cast<unsigned>(per_row);
  const long long counter = thread - row * per_row;
  if (seed_address != nullptr) seed = __ldg(seed_address);
  if (offset_address != nullptr) offset = __ldg(offset_address);
  const long long column = counter / 4 * 16 + counter % 4 * 2;
  const PhiloxWords random = RandomWords(seed, offset, row, column);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const long long first = column + half * 8, left = columns - first;
    const int count = left > 2 ? 2 : static_cast<int>(left);
    DropPair<Dtype>(x, y, row * columns + first, count,
                    uint2{random.words[half * 2], random.words[half * 2 + 1]}, threshold, scale);
  }
}

#define DROPOUT_KERNEL(name, Dtype)                                                               \
  extern "C" __global__ void name(const void* x, void* y, const unsigned long long* seed_address, \
                                  const unsigned long long* offset_address,                       \
                                  unsigned long long seed, unsigned long long offset,             \
                                  long long rows, long long columns, long long threshold,         \
                                  float scale) {                                                  \
    Drop<Dtype>(x, y, seed_address, offset_address, seed, offset, rows, columns,                  \
                static_cast<unsigned>(threshold), scale);                                         \
  }

DROPOUT_KERNEL(stoneware_dropout_float32, Float32)
DROPOUT_KERNEL(stoneware_dropout_bfloat16, BFloat16)
DROPOUT_KERNEL(stoneware_dropout_float16, Float16)
