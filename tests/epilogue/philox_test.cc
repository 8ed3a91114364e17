// The device code of sw.dropout, compiled for the host: Philox's known answers, and the same bits
// for an element whatever pair, fragment or orientation it comes in.

#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#define DEVICE inline

struct uint2 {
  unsigned x;
  unsigned y;
};

#include "py/stoneware/epilogue/philox.h"

namespace {

constexpr unsigned long long kSeed = 0x123456789ABCDEF;
constexpr unsigned long long kOffset = (1ull << 40) + 5;

// What RandomOfPair and RandomOfFragment read of device_code.h's Place.
struct Place {
  long long m;
  long long n;
  bool is_along_m;
  int slot;
};

void Expect(bool is_true, const char* what, long long m, long long n) {
  if (is_true) return;
  std::printf("%s, at row %lld and column %lld\n", what, m, n);
  std::exit(1);
}

void TestKnownAnswers() {
  // Random123's tests/kat_vectors, "philox4x32 10": counter, key, result.
  constexpr unsigned kAnswers[][10] = {
      {0, 0, 0, 0, 0, 0, 0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8},
      {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, 0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD},
      {0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0, 0xD16CFE09,
       0x94FDCCEB, 0x5001E420, 0x24126EA1},
  };
  for (const auto& answer : kAnswers) {
    const PhiloxWords random =
        Philox(answer[0], answer[1], answer[2], answer[3], answer[4], answer[5]);
    for (int i = 0; i < 4; ++i) {
      Expect(random.words[i] == answer[6 + i], "a known answer differs", i, 0);
    }
  }
}

// The same numbers are in dropout_test.py.
void TestElements() {
  Expect(RandomWord(kSeed, kOffset, 0, 0) == 2816967650u, "a word differs", 0, 0);
  Expect(RandomWord(kSeed, kOffset, 5, 27) == 1858158879u, "a word differs", 5, 27);
  Expect(RandomWord(kSeed, kOffset, 123456, 8190) == 3138216731u, "a word differs", 123456, 8190);
}

void ExpectPair(const Place& at, uint2 random) {
  const long long m = at.m + at.is_along_m, n = at.n + !at.is_along_m;
  Expect(random.x == RandomWord(kSeed, kOffset, at.m, at.n), "the first of a pair differs", at.m,
         at.n);
  Expect(random.y == RandomWord(kSeed, kOffset, m, n), "the second of a pair differs", m, n);
}

// As cc/gemm/epilogue_sm90.h describes it, for each lane of a warp. Tiles of grouped_mm begin at
// any row, and tiles of 8 modulo 16 columns at odd multiples of 8.
void TestFragments() {
  for (const bool is_along_m : {false, true}) {
    for (const int first_m : {0, 1, 8, 13, 128}) {
      for (const int first_n : {0, 8, 16, 520}) {
        for (int lane = 0; lane < 32; ++lane) {
          unsigned words[4] = {0xDEAD, 0xDEAD, 0xDEAD, 0xDEAD};
          for (int fragment = 0; fragment < 3; ++fragment) {
            for (int slot = 0; slot < 4; ++slot) {
              const int row = slot % 2 * 8 + lane / 4;
              const int column = fragment * 16 + slot / 2 * 8 + 2 * (lane % 4);
              const Place at = {first_m + (is_along_m ? column : row),
                                first_n + (is_along_m ? row : column), is_along_m, slot};
              ExpectPair(at, RandomOfFragment(at, words, kSeed, kOffset));
              const Place alone = {at.m, at.n, is_along_m, -1};
              ExpectPair(alone, RandomOfPair(alone, kSeed, kOffset));
              unsigned untouched[4] = {1, 2, 3, 4};
              ExpectPair(alone, RandomOfFragment(alone, untouched, kSeed, kOffset));
              Expect(untouched[0] == 1 && untouched[3] == 4, "a pair without a fragment writes", 0,
                     0);
            }
          }
        }
      }
    }
  }
}

}  // namespace

int main() {
  TestKnownAnswers();
  TestElements();
  TestFragments();
  std::printf("passed\n");
  return 0;
}
