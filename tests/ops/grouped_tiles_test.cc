// The walk over the tiles of a grouped matmul, on the host: every row and column of every group is
// in exactly one tile, no tile is empty, and the order is that of the header's words.

#include <cstdint>
#include <cstdio>
#include <map>
#include <random>
#include <vector>

#include "cc/gemm/grouped_tiles.h"
#include "tests/expect.h"

namespace {

namespace sm90 = stoneware::gemm::sm90;
using stoneware::tests::g_failures;

// Rows of a tile along m.
constexpr int kTileM = 128;

void CheckWalk(const std::vector<std::int32_t>& offsets, int m, int num_n_tiles, int band) {
  const int num_groups = static_cast<int>(offsets.size());
  std::vector<int> ends;
  std::vector<int> m_tiles;
  const stoneware::gemm::FastDivmod tiles_of_band(band * num_n_tiles);
  int end = 0;
  for (int group = 0; group < num_groups; ++group) {
    const sm90::GroupRows rows = sm90::RowsOfGroup(offsets.data(), group, m);
    EXPECT(0 <= rows.begin && rows.begin <= rows.end && rows.end <= m);
    m_tiles.push_back(sm90::NumTiles(rows.end - rows.begin, kTileM));
    end += m_tiles.back() * num_n_tiles;
    ends.push_back(end);
  }
  std::map<std::vector<int>, int> seen;
  sm90::TileOfGroup last = {0, 0};
  int last_group = 0;
  for (int tile = 0; tile < end; ++tile) {
    const int group = sm90::GroupAt(tile, ends.data(), num_groups);
    const int first = group == 0 ? 0 : ends[group - 1];
    const sm90::TileOfGroup found = sm90::TileAt(tile - first, m_tiles[group], tiles_of_band, band);
    ++seen[{group, found.m_idx, found.n_idx}];
    const sm90::GroupRows rows = sm90::RowsOfGroup(offsets.data(), group, m);
    EXPECT(rows.begin + found.m_idx * kTileM < rows.end);
    EXPECT(found.m_idx >= 0 && found.n_idx >= 0 && found.n_idx < num_n_tiles);
    // Group after group, band after band, n after n, m after m.
    const std::vector<int> place = {group, found.m_idx / band, found.n_idx, found.m_idx};
    const std::vector<int> last_place = {last_group, last.m_idx / band, last.n_idx, last.m_idx};
    EXPECT(tile == 0 || last_place < place);
    last = found;
    last_group = group;
  }
  EXPECT(static_cast<int>(seen.size()) == end);
}

}  // namespace

int main() {
  const unsigned seed = std::random_device{}();
  std::mt19937 random(seed);
  for (int round = 0; round < 300; ++round) {
    const int num_groups = 1 + static_cast<int>(random() % 40);
    std::vector<std::int32_t> offsets;
    std::int32_t end = 0;
    for (int group = 0; group < num_groups; ++group) {
      const int kind = static_cast<int>(random() % 4);
      end += static_cast<std::int32_t>(kind == 0   ? 0
                                       : kind == 1 ? 1
                                       : kind == 2 ? random() % (3 * kTileM)
                                                   : random() % (20 * kTileM));
      offsets.push_back(end);
    }
    const int num_n_tiles = 1 + static_cast<int>(random() % 9);
    CheckWalk(offsets, end + static_cast<int>(random() % 3), num_n_tiles,
              1 + static_cast<int>(random() % 20));
    // Broken promises are cut, and stay in bounds.
    CheckWalk(offsets, end / 2, num_n_tiles, 16);
    offsets[random() % offsets.size()] = static_cast<std::int32_t>(random());
    CheckWalk(offsets, end, num_n_tiles, 16);
  }
  if (g_failures != 0) std::fprintf(stderr, "%d failures with seed %u\n", g_failures, seed);
  return g_failures == 0 ? 0 : 1;
}
