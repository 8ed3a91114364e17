// Behind device_code.h: parts that keep words in the state, from one call of a fragment to the next
// (cc/gemm/epilogue_sm90.h), so that a lane loads and stores 16 bytes. A pair without a fragment
// takes the parts of device_code.h. d has a multiple of 8 columns.

// Transposes the words of four neighbouring lanes.
DEVICE void TransposeInQuad(unsigned* words) {
  const int lane = Lane();
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool is_set = (lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const unsigned received =
          __shfl_xor_sync(0xffffffff, is_set ? words[i] : words[i + bit], bit);
      words[i] = is_set ? received : words[i];
      words[i + bit] = is_set ? words[i + bit] : received;
    }
  }
}

// Transposes the 8 x 8 elements of 16 bits of a warp.
DEVICE unsigned TransposeInWarp(unsigned word) {
  unsigned result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
  return result;
}

// The eight neighbours along n of a fragment of 16 x 16 that one lane has in memory.
struct EightOfFragment {
  long long m;
  long long n;
  bool is_inside;

  // In the call of `slot`.
  DEVICE EightOfFragment(const Place& at, const EpiloguePair& pair, int slot) {
    const int lane = Lane(), quad_lane = lane % 4;
    const int along_columns = slot / 2 * 8, along_rows = slot % 2 * 8;
    if (at.is_along_m) {
      m = at.m - along_columns - 2 * quad_lane + quad_lane / 2 * 8 + lane / 4;
      n = at.n - along_rows - lane / 4 + quad_lane % 2 * 8;
    } else {
      m = at.m - along_rows + quad_lane % 2 * 8;
      n = at.n - along_columns - 2 * quad_lane + quad_lane / 2 * 8;
    }
    is_inside = m < pair.m_end && n < pair.n_end;
  }
};

// Both values of a row-major input of 16 bits, whose rows begin at multiples of 16 bytes.
template <class Dtype>
DEVICE float2 LoadOfFragment(const Place& at, const EpiloguePair& pair, unsigned* words,
                             const void* input, long long row_stride) {
  if (at.slot < 0) return LoadBoth<Dtype, true>(at, input, row_stride, 1);
  if (at.slot == 0) {
    const EightOfFragment eight(at, pair, 0);
    const auto* const address =
        static_cast<const typename Dtype::Bits*>(input) + eight.m * row_stride + eight.n;
    const uint4 four =
        eight.is_inside ? __ldg(reinterpret_cast<const uint4*>(address)) : uint4{0, 0, 0, 0};
    words[0] = four.x;
    words[1] = four.y;
    words[2] = four.z;
    words[3] = four.w;
    TransposeInQuad(words);
    if (at.is_along_m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = TransposeInWarp(words[i]);
    }
  }
  return Dtype::ToFloats(words[at.slot]);
}

// Both values of an input whose rows are all one. kHasPairs: as for LoadBoth.
template <class Dtype, bool kHasPairs>
DEVICE float2 LoadOfRow(const Place& at, const EpiloguePair& pair, unsigned* words,
                        const void* input, long long column_stride) {
  using Bits = typename Dtype::Bits;
  const Bits* const x = static_cast<const Bits*>(input) + at.n * column_stride;
  const bool is_inside = at.n < pair.n_end;
  if (at.is_along_m) {
    const int j = at.slot % 2;
    if (at.slot < 0 || (at.is_first && at.slot < 2)) {
      const float value = is_inside ? Dtype::ToFloat(__ldg(x)) : 0.0f;
      if (at.slot < 0) return {value, value};
      words[j] = __float_as_uint(value);
    }
    return {__uint_as_float(words[j]), __uint_as_float(words[j])};
  }
  if (at.slot < 0 || at.slot % 2 == 0) {
    float2 values = {0.0f, 0.0f};
    if (is_inside) {
      values = kHasPairs
                   ? Dtype::ToFloats(__ldg(reinterpret_cast<const typename Dtype::Two*>(x)))
                   : float2{Dtype::ToFloat(__ldg(x)), Dtype::ToFloat(__ldg(x + column_stride))};
    }
    if (at.slot < 0) return values;
    words[0] = __float_as_uint(values.x);
    words[1] = __float_as_uint(values.y);
  }
  return {__uint_as_float(words[0]), __uint_as_float(words[1])};
}

// Into a row-major output of 16 bits.
template <class Dtype>
DEVICE void StoreOfFragment(const Place& at, const EpiloguePair& pair, unsigned* words,
                            void* output, float x, float y) {
  if (at.slot < 0) {
    StoreBoth<Dtype>(at, output, x, y);
    return;
  }
  words[at.slot] = Dtype::FromFloats(x, y);
  if (at.slot < 3) return;
  if (at.is_along_m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = TransposeInWarp(words[i]);
  }
  TransposeInQuad(words);
  const EightOfFragment eight(at, pair, 3);
  auto* const address = static_cast<typename Dtype::Bits*>(output) + eight.m * at.columns + eight.n;
  if (eight.is_inside) {
    *reinterpret_cast<uint4*>(address) = uint4{words[0], words[1], words[2], words[3]};
  }
}

// Into a row-major output of 16 or 8 bits with one element per two columns.
template <class Dtype>
DEVICE void StoreHalfOfFragment(const Place& at, const EpiloguePair& pair, unsigned* words,
                                void* output, float value) {
  using Bits = typename Dtype::Bits;
  if (at.slot < 0 || at.is_along_m) {
    StoreHalf<Dtype>(at, output, value);
    return;
  }
  words[at.slot] = __float_as_uint(value);
  if (at.slot < 3) return;
  // Column c of the fragment's eight is in lane c % 4, of slot c / 4 * 2 and the next. Lane q gets
  // columns 2 q and 2 q + 1.
  const int quad_lane = Lane() % 4, first = Lane() / 4 * 4 + quad_lane % 2 * 2;
  const auto pairs_of = [&](int row) {
    return static_cast<unsigned>(
        Dtype::FromFloats(__uint_as_float(words[row]), __uint_as_float(words[2 + row])));
  };
  const long long n = at.n - 8 - 2 * quad_lane + quad_lane / 2 * 8;  // of two elements
  Bits* const row = static_cast<Bits*>(output) + (at.m - 8) * (at.columns / 2);
  if (sizeof(Bits) == 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned word = pairs_of(i);
      const unsigned even = __shfl_sync(0xffffffff, word, first);
      const unsigned odd = __shfl_sync(0xffffffff, word, first + 1);
      const unsigned two = __byte_perm(even, odd, quad_lane < 2 ? 0x5410 : 0x7632);
      if (at.m - 8 + i * 8 < pair.m_end && n < pair.n_end) {
        Bits* const to = row + i * 8 * (at.columns / 2) + n / 2 + quad_lane % 2 * 2;
        *reinterpret_cast<unsigned*>(to) = two;
      }
    }
  } else {
    const unsigned word = pairs_of(0) | pairs_of(1) << 16;
    const unsigned even = __shfl_sync(0xffffffff, word, first);
    const unsigned odd = __shfl_sync(0xffffffff, word, first + 1);
    // Two elements of the first row, and the same of the row 8 later.
    const unsigned both = __byte_perm(even, odd, quad_lane < 2 ? 0x6240 : 0x7351);
    // An even lane stores four of the first row, an odd one four of the other.
    const bool is_odd = quad_lane % 2 != 0;
    const unsigned other = __shfl_xor_sync(0xffffffff, both, 1);
    const unsigned four =
        is_odd ? __byte_perm(other, both, 0x7632) : __byte_perm(both, other, 0x5410);
    if (at.m - 8 + is_odd * 8 < pair.m_end && n < pair.n_end) {
      *reinterpret_cast<unsigned*>(row + is_odd * 8 * (at.columns / 2) + n / 2) = four;
    }
  }
}

// The maxima of the rows that a warp has of a tile, with values along m. Eight rows come at a time.
// A lane keeps one of each four maxima, and the warp raises the output at the end, 32 rows in one
// atomic operation: with one for each eight rows, warps that end together wait for each other.
struct RowMaxAlongM {
  static constexpr int kMostRows = 256;
  static constexpr int kKept = kMostRows / 32;

  unsigned words[2];  // x and y of the first eight n
  int num_eights;     // of rows, so far
  unsigned kept[kKept];

  DEVICE void Add(float largest) {
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      kept[i] = num_eights == 4 * i + Lane() / 8 ? __float_as_uint(largest) : kept[i];
    }
    ++num_eights;
  }

  // `m` is one past the last of the rows, and `turn` says with which of them to begin.
  DEVICE void Raise(float* output, long long m, int turn, int m_end) {
    const int num_kept = (num_eights + 3) / 4, first = turn % num_kept;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if (i >= num_kept) continue;
      const int at = first + i < num_kept ? first + i : first + i - num_kept;
      unsigned value = kept[0];
#pragma unroll
      for (int j = 1; j < kKept; ++j) value = at == j ? kept[j] : value;
      const int eight = 4 * at + Lane() / 8;
      const long long row = m + 8 * (eight - num_eights) + 2 * (Lane() % 4) + Lane() / 4 % 2;
      if (eight < num_eights && row < m_end) RaiseTo(output + row, __uint_as_float(value));
    }
    num_eights = 0;
  }
};

// As StoreRowMax, with fewer atomic operations. The words begin where a RowMaxAlongM may.
DEVICE void StoreRowMaxOfRun(const Place& at, const EpiloguePair& pair, unsigned* words,
                             float* output, float x, float y) {
  if (at.is_along_m) {
    auto* const maxima = reinterpret_cast<RowMaxAlongM*>(words);
    const long long first_m = at.m - 2 * (Lane() % 4);  // of eight
    if (at.slot < 0) {
      StoreRowMax(at, output, x, y);
      if (at.is_last && !at.is_first && maxima->num_eights > 0) {
        maxima->Raise(output, first_m, pair.n / 16, pair.m_end);
      }
      return;
    }
    if (at.is_first && at.slot == 0) maxima->num_eights = 0;
    x = at.has_x ? x : -INFINITY_F;
    y = at.has_y ? y : -INFINITY_F;
    if (at.slot % 2 == 0) {
      maxima->words[0] = __float_as_uint(x);
      maxima->words[1] = __float_as_uint(y);
      return;
    }
    x = Max(x, __uint_as_float(maxima->words[0]));
    y = Max(y, __uint_as_float(maxima->words[1]));
    // Lanes with an odd n take y, the others x.
    const bool has_y = (Lane() & 4) != 0;
    const float largest = Max(has_y ? y : x, __shfl_xor_sync(0xffffffff, has_y ? x : y, 4));
    maxima->Add(MaxOfLanes(largest, 8, 16));
    if (at.is_last && at.slot == 3) {
      maxima->Raise(output, first_m + 8, pair.n / 16, pair.m_end);
    }
    return;
  }
  if (at.slot < 0) {
    StoreRowMax(at, output, x, y);
    return;
  }
  float largest = Max(at.has_x ? x : -INFINITY_F, at.has_y ? y : -INFINITY_F);
  const int j = at.slot % 2;
  if (!at.is_first || at.slot >= 2) largest = Max(largest, __uint_as_float(words[j]));
  words[j] = __float_as_uint(largest);
  if (!at.is_last || at.slot < 2) return;
  largest = MaxOfLanes(largest, 1, 2);
  if (Lane() % 4 == 0 && at.has_row_x) RaiseTo(output + at.m, largest);
}
