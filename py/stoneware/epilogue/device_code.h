// What the text of every epilogue begins with (source.py). It includes nothing: NVRTC compiles it
// where no header is. The first four structures are those of cc/gemm/epilogue_sm90.h.

struct EpiloguePair {
  int m;
  int n;
  bool is_along_m;
  int m_end;
  int n_end;
  int group;
  int slot;
  bool is_first;
  bool is_last;
};

struct EpilogueState {
  unsigned words[64];
};

struct EpilogueTile {
  int m;
  int n;
  int rows;
  int columns;
  int m_end;
  int n_end;
  int thread;
  int num_threads;
};

struct alignas(64) EpilogueParams {
  unsigned char bytes[512];
};

#define DEVICE __device__ __forceinline__
#define INFINITY_F __int_as_float(0x7f800000)
#define NAN_F __int_as_float(0x7fc00000)

DEVICE bool Truth(bool value) { return value; }
DEVICE bool Truth(float value) { return value != 0.0f; }

// Both give NaN if an argument is one, as in torch.
DEVICE float Max(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

DEVICE float Min(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

DEVICE float Reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

DEVICE float ExponentialOf2(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

DEVICE float Exponential(float value) { return ExponentialOf2(value * 1.4426950408889634f); }

DEVICE float Sigmoid(float value) { return Reciprocal(1.0f + Exponential(-value)); }

// x (1 + erf(z)) / 2 with z = x / sqrt(2). With t = 1 / (1 + 0.36 |x|), erfc(|z|) exp(z^2) / 2 is
// t times a polynomial of t, found by weighted least squares; relative error 9e-7. Beyond 64 the
// result is x, and infinity times zero must not be formed.
DEVICE float Gelu(float value) {
  const float x = Min(value, 64.0f);
  const float y = x * 0.84932180f;  // 2^(-y^2) is exp(-z^2)
  const float t = Reciprocal(fmaf(0.36f, fabsf(x), 1.0f));
  float p = fmaf(t, 0.04705626f, -0.17976462f);
  p = fmaf(t, p, 0.18095394f);
  p = fmaf(t, p, 0.02654934f);
  p = fmaf(t, p, 0.13971928f);
  p = fmaf(t, p, 0.14177245f);
  p = fmaf(t, p, 0.14371305f);
  const float tail = t * p * ExponentialOf2(-y * y);
  return fmaf(-fabsf(x), tail, Max(value, 0.0f));
}

// x tanh(log(1 + e)) with e = exp(x), whose tanh is (e^2 + 2 e) / (e^2 + 2 e + 2).
DEVICE float Mish(float value) {
  const float e = Exponential(value);
  const float numerator = e * (e + 2.0f);
  return value > 20.0f ? value : value * (numerator * Reciprocal(numerator + 2.0f));
}

// A dtype: how its elements are in memory (Bits, and Two of them), and as floats.
struct Float32 {
  using Bits = unsigned;
  using Two = uint2;
  static DEVICE float ToFloat(Bits bits) { return __uint_as_float(bits); }
  static DEVICE Bits FromFloat(float value) { return __float_as_uint(value); }
  static DEVICE float2 ToFloats(Two two) { return {ToFloat(two.x), ToFloat(two.y)}; }
  static DEVICE Two FromFloats(float x, float y) { return {FromFloat(x), FromFloat(y)}; }
};

struct BFloat16 {
  using Bits = unsigned short;
  using Two = unsigned;
  static DEVICE float ToFloat(Bits bits) {
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
  }
  static DEVICE Bits FromFloat(float value) {
    return static_cast<Bits>(FromFloats(value, 0.0f) & 0xffff);
  }
  static DEVICE float2 ToFloats(Two two) {
    return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000)};
  }
  static DEVICE Two FromFloats(float x, float y) {
    Two two;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(y), "f"(x));
    return two;
  }
};

struct Float16 {
  using Bits = unsigned short;
  using Two = unsigned;
  static DEVICE float ToFloat(Bits bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
  static DEVICE Bits FromFloat(float value) {
    Bits bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
  static DEVICE float2 ToFloats(Two two) {
    return {ToFloat(static_cast<Bits>(two & 0xffff)), ToFloat(static_cast<Bits>(two >> 16))};
  }
  static DEVICE Two FromFloats(float x, float y) {
    Two two;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(y), "f"(x));
    return two;
  }
};

// The conversion to fp8 saturates; torch's gives what its format has for values that are too large.
struct Float8E4M3 {
  using Bits = unsigned char;
  using Two = unsigned short;
  static DEVICE float ToFloat(Bits bits) { return ToFloats(bits).x; }
  static DEVICE Bits FromFloat(float value) {
    return static_cast<Bits>(FromFloats(value, 0.0f) & 0xff);
  }
  static DEVICE float2 ToFloats(Two two) {
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(two));
    return Float16::ToFloats(halves);
  }
  static DEVICE Two FromFloats(float x, float y) {
    Two two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(Finite(y)), "f"(Finite(x)));
    return two;
  }
  // 464 lies between the largest value, 448, and what would be the next.
  static DEVICE float Finite(float value) { return fabsf(value) > 464.0f ? NAN_F : value; }
};

struct Float8E5M2 {
  using Bits = unsigned char;
  using Two = unsigned short;
  static DEVICE float ToFloat(Bits bits) { return ToFloats(bits).x; }
  static DEVICE Bits FromFloat(float value) {
    const Two two = FromFloats(value, 0.0f);
    return static_cast<Bits>(two & 0xff);
  }
  static DEVICE float2 ToFloats(Two two) {
    unsigned halves;
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(two));
    return Float16::ToFloats(halves);
  }
  static DEVICE Two FromFloats(float x, float y) {
    Two two;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(two) : "f"(y), "f"(x));
    if (fabsf(x) >= 61440.0f) two = (two & 0xff00) | Infinity(x);
    if (fabsf(y) >= 61440.0f) two = (two & 0x00ff) | static_cast<Two>(Infinity(y) << 8);
    return two;
  }
  static DEVICE Two Infinity(float value) { return value < 0.0f ? 0xfc : 0x7c; }
};

struct Bool {
  using Bits = unsigned char;
  using Two = unsigned short;
  static DEVICE bool ToFloat(Bits bits) { return bits != 0; }
  static DEVICE Bits FromFloat(float value) { return value != 0.0f; }
  static DEVICE float2 ToFloats(Two two) {
    return {(two & 0xff) != 0 ? 1.0f : 0.0f, (two >> 8) != 0 ? 1.0f : 0.0f};
  }
  static DEVICE Two FromFloats(float x, float y) {
    return static_cast<Two>(FromFloat(x) | FromFloat(y) << 8);
  }
};

// What is left of a value in a dtype.
template <class Dtype>
DEVICE float Rounded(float value) {
  return Dtype::ToFloat(Dtype::FromFloat(value));
}

// Where a pair's two values are, and the one that two columns have together.
struct Place {
  long long m;
  long long n;
  bool is_along_m;
  bool has_x;
  bool has_y;
  long long half_m;
  long long half_n;
  bool has_half;
  long long columns;
  bool has_row_x;
  bool has_row_y;
  int slot;
  bool is_first;
  bool is_last;

  DEVICE explicit Place(const EpiloguePair& pair)
      : m(pair.m),
        n(pair.n),
        is_along_m(pair.is_along_m),
        has_x(pair.m < pair.m_end && pair.n < pair.n_end),
        has_y(pair.is_along_m ? pair.m + 1 < pair.m_end && pair.n < pair.n_end : has_x),
        half_m(pair.is_along_m ? pair.m + pair.n % 2 : pair.m),
        half_n(pair.n / 2),
        has_half(pair.is_along_m && pair.n % 2 != 0 ? has_y : has_x),
        columns(pair.n_end),
        has_row_x(pair.m < pair.m_end),
        has_row_y(pair.is_along_m ? pair.m + 1 < pair.m_end : has_row_x),
        slot(pair.slot),
        is_first(pair.is_first),
        is_last(pair.is_last) {}
};

template <class T>
DEVICE T Parameter(const EpilogueParams* params, int offset) {
  return *reinterpret_cast<const T*>(params->bytes + offset);
}

// Of two values that are neighbours along n, the even one and the odd one. Along m the lane with
// the other n has the other value: this lane keeps one row, and gives the other away.
DEVICE float2 EvenAndOdd(const Place& at, float x, float y) {
  if (!at.is_along_m) return {x, y};
  const bool is_even = at.n % 2 == 0;
  const float other = __shfl_xor_sync(0xffffffff, is_even ? y : x, 4);
  return is_even ? float2{x, other} : float2{other, y};
}

// And back.
DEVICE float2 XAndY(const Place& at, float2 even_and_odd) {
  if (!at.is_along_m) return even_and_odd;
  const bool is_even = at.n % 2 == 0;
  const float other = __shfl_xor_sync(0xffffffff, is_even ? even_and_odd.y : even_and_odd.x, 4);
  return is_even ? float2{even_and_odd.x, other} : float2{other, even_and_odd.y};
}

// Both values of an input. kHasPairs: neighbours along n can be read together.
template <class Dtype, bool kHasPairs>
DEVICE float2 LoadBoth(const Place& at, const void* input, long long row_stride,
                       long long column_stride) {
  using Bits = typename Dtype::Bits;
  using Two = typename Dtype::Two;
  const Bits* const x = static_cast<const Bits*>(input) + at.m * row_stride + at.n * column_stride;
  if (kHasPairs) {
    const Bits* const two =
        static_cast<const Bits*>(input) + at.half_m * row_stride + at.half_n * 2;
    return XAndY(at, at.has_half ? Dtype::ToFloats(__ldg(reinterpret_cast<const Two*>(two)))
                                 : float2{0.0f, 0.0f});
  }
  const Bits* const y = x + (at.is_along_m ? row_stride : column_stride);
  return {at.has_x ? Dtype::ToFloat(__ldg(x)) : 0.0f, at.has_y ? Dtype::ToFloat(__ldg(y)) : 0.0f};
}

// The value of an input with one element.
template <class Dtype>
DEVICE float LoadScalar(const void* input) {
  return Dtype::ToFloat(__ldg(static_cast<const typename Dtype::Bits*>(input)));
}

// The value of an input with one element per two columns.
template <class Dtype>
DEVICE float LoadHalf(const Place& at, const void* input, long long row_stride,
                      long long column_stride) {
  using Bits = typename Dtype::Bits;
  const Bits* const half =
      static_cast<const Bits*>(input) + at.half_m * row_stride + at.half_n * column_stride;
  return at.has_half ? Dtype::ToFloat(__ldg(half)) : 0.0f;
}

// Into a row-major output.
template <class Dtype>
DEVICE void StoreBoth(const Place& at, void* output, float x, float y) {
  using Bits = typename Dtype::Bits;
  using Two = typename Dtype::Two;
  const float2 both = EvenAndOdd(at, x, y);
  Bits* const two = static_cast<Bits*>(output) + at.half_m * at.columns + at.half_n * 2;
  if (at.has_half) *reinterpret_cast<Two*>(two) = Dtype::FromFloats(both.x, both.y);
}

template <class Dtype>
DEVICE void StoreHalf(const Place& at, void* output, float value) {
  using Bits = typename Dtype::Bits;
  if (at.has_half) {
    static_cast<Bits*>(output)[at.half_m * (at.columns / 2) + at.half_n] = Dtype::FromFloat(value);
  }
}

// The output has -infinity at first. Integers are ordered like the floats of their sign.
DEVICE void RaiseTo(float* output, float value) {
  value += 0.0f;  // no -0
  if (value != value) value = NAN_F;
  if (__float_as_int(value) >= 0) {
    atomicMax(reinterpret_cast<int*>(output), __float_as_int(value));
  } else {
    atomicMin(reinterpret_cast<unsigned*>(output), __float_as_uint(value));
  }
}

DEVICE float MaxOfLanes(float value, int first_mask, int last_mask) {
#pragma unroll
  for (int mask = first_mask; mask <= last_mask; mask *= 2) {
    value = Max(value, __shfl_xor_sync(0xffffffff, value, mask));
  }
  return value;
}

DEVICE int Lane() {
  int lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// The lanes of a quad hold one row; with values along m, those with one place in their quads do.
DEVICE void StoreRowMax(const Place& at, float* output, float x, float y) {
  x = at.has_x ? x : -INFINITY_F;
  y = at.has_y ? y : -INFINITY_F;
  if (at.is_along_m) {
    x = MaxOfLanes(x, 4, 16);
    y = MaxOfLanes(y, 4, 16);
    if (Lane() < 4 && at.has_x) RaiseTo(output + at.m, x);
    if (Lane() < 4 && at.has_y) RaiseTo(output + at.m + 1, y);
  } else {
    x = MaxOfLanes(Max(x, y), 1, 2);
    if (Lane() % 4 == 0 && at.has_x) RaiseTo(output + at.m, x);
  }
}

DEVICE void StoreHalfRowMax(const Place& at, float* output, float value) {
  value = at.has_half ? value : -INFINITY_F;
  if (at.is_along_m) {
    value = MaxOfLanes(value, 8, 16);
    if (Lane() < 8 && at.has_half) RaiseTo(output + at.half_m, value);
  } else {
    value = MaxOfLanes(value, 1, 2);
    if (Lane() % 4 == 0 && at.has_half) RaiseTo(output + at.half_m, value);
  }
}

// Brings a tile's part of a row-major input to L2. Its address and its rows begin at multiples of
// 16 bytes.
template <class Dtype>
DEVICE void PrefetchRows(const EpilogueTile& tile, const void* input, long long row_stride) {
  using Bits = typename Dtype::Bits;
  const int rows = min(tile.rows, tile.m_end - tile.m);
  const int columns = min(tile.columns, tile.n_end - tile.n);
  // Rounded up to what the instruction takes; a row of the input has these bytes.
  const int bytes = (columns * static_cast<int>(sizeof(Bits)) + 15) / 16 * 16;
  for (int row = tile.thread; row < rows; row += tile.num_threads) {
    const Bits* const first = static_cast<const Bits*>(input) + (tile.m + row) * row_stride;
    const unsigned long long address =
        reinterpret_cast<unsigned long long>(first + tile.n) / 16 * 16;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes));
  }
}
