// Random bits of sw.dropout: each element has 32 bits that depend on a seed, an offset, its row and
// its column alone, by Philox-4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as
// easy as 1, 2, 3", SC 2011). philox.py computes the same with torch.
//
// A counter has 4 words of random bits, for 4 elements of a row: those columns that differ in bits
// 0 and 3 alone, since one thread of a matmul has them (fragments.h).
//
//   counter   {column / 16 * 4 + column / 2 % 4, row, low and high word of the offset}
//   key       {low and high word of the seed}
//   word      column / 8 % 2 * 2 + column % 2
//
// It includes nothing, and expects DEVICE; tests compile it for the host.

struct PhiloxWords {
  unsigned words[4];
};

DEVICE PhiloxWords Philox(unsigned c0, unsigned c1, unsigned c2, unsigned c3, unsigned k0,
                          unsigned k1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned long long product0 = 0xD2511F53ull * c0;
    const unsigned long long product1 = 0xCD9E8D57ull * c2;
    c0 = static_cast<unsigned>(product1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<unsigned>(product1);
    c2 = static_cast<unsigned>(product0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<unsigned>(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The bits of a column and of the 3 others of its counter.
DEVICE PhiloxWords RandomWords(unsigned long long seed, unsigned long long offset, long long row,
                               long long column) {
  return Philox(static_cast<unsigned>(column / 16 * 4 + column / 2 % 4), static_cast<unsigned>(row),
                static_cast<unsigned>(offset), static_cast<unsigned>(offset >> 32),
                static_cast<unsigned>(seed), static_cast<unsigned>(seed >> 32));
}

// The bits of one element.
DEVICE unsigned RandomWord(unsigned long long seed, unsigned long long offset, long long row,
                           long long column) {
  const PhiloxWords random = RandomWords(seed, offset, row, column);
  const unsigned even = column & 8 ? random.words[2] : random.words[0];
  const unsigned odd = column & 8 ? random.words[3] : random.words[1];
  return column & 1 ? odd : even;
}

// The bits of a pair's two elements.
template <class Place>
DEVICE uint2 RandomOfPair(const Place& at, unsigned long long seed, unsigned long long offset) {
  if (at.is_along_m) {
    return {RandomWord(seed, offset, at.m, at.n), RandomWord(seed, offset, at.m + 1, at.n)};
  }
  const PhiloxWords random = RandomWords(seed, offset, at.m, at.n);
  return at.n & 8 ? uint2{random.words[2], random.words[3]}
                  : uint2{random.words[0], random.words[1]};
}

// The same. In a fragment of 4 pairs, the first two or, along m, every other one leaves bits for
// the others in `words`, 4 words of the state.
template <class Place>
DEVICE uint2 RandomOfFragment(const Place& at, unsigned* words, unsigned long long seed,
                              unsigned long long offset) {
  if (at.slot < 0) return RandomOfPair(at, seed, offset);
  // The earlier pair was 8 columns before. Its bits are of the same counter if its bit 3 was 0.
  const bool has_bit = (at.n & 8) != 0;
  const int j = at.slot % 2;
  if (at.is_along_m) {
    if (j == 1 && has_bit) return {words[0], words[1]};
    const PhiloxWords x = RandomWords(seed, offset, at.m, at.n);
    const PhiloxWords y = RandomWords(seed, offset, at.m + 1, at.n);
    const bool is_odd = at.n & 1;
    words[0] = is_odd ? x.words[3] : x.words[2];
    words[1] = is_odd ? y.words[3] : y.words[2];
    if (has_bit) return {words[0], words[1]};
    return is_odd ? uint2{x.words[1], y.words[1]} : uint2{x.words[0], y.words[0]};
  }
  if (at.slot < 2 || !has_bit) {
    const PhiloxWords random = RandomWords(seed, offset, at.m, at.n);
    words[2 * j] = random.words[2];
    words[2 * j + 1] = random.words[3];
    if (!has_bit) return {random.words[0], random.words[1]};
  }
  return {words[2 * j], words[2 * j + 1]};
}
