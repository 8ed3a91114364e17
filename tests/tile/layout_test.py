"""The addresses that wgmma computes from our descriptors are those of the tile's elements.

NVRTC evaluates the functions of cc/tile in static assertions. The hardware's side is written out below: the
canonical layouts of the PTX ISA ("wgmma", "Strides" and "Matrix Descriptor Format"), with the swizzle on the
bits of the address.
"""

from __future__ import annotations

import itertools

import pytest

from stoneware.errors import LinkError
from stoneware.linking import toolchain
from stoneware.tile import source

_PROGRAM = """\
#include "cc/tile/wgmma.cuh"

using namespace stoneware::tile;

// The byte that wgmma reads for element (outer, k) of an operand, from the fields of its descriptor.
template <class OperandType>
__device__ constexpr int HardwareByte(unsigned long long descriptor, int outer, int k, int element_bytes) {
  const int start = static_cast<int>(descriptor & 0x3fff) * 16;
  const int leading = static_cast<int>(descriptor >> 16 & 0x3fff) * 16;
  const int stride = static_cast<int>(descriptor >> 32 & 0x3fff) * 16;
  const int mode = static_cast<int>(descriptor >> 62);
  const int width = mode == 1 ? 128 : mode == 2 ? 64 : 32;
  int address = start;
  if (OperandType::kIsKMajor) {
    address += outer / 8 * stride + outer % 8 * width + k * element_bytes;
  } else {
    const int elements = width / element_bytes;
    address += outer / elements * leading + outer % elements * element_bytes + k / 8 * stride + k % 8 * width;
  }
  return address ^ (address >> 3 & (width - 16));
}

template <class OperandType, int kOuter, int kFirst>
__device__ constexpr bool Agrees(int base) {
  using Tile = typename OperandType::Tile;
  constexpr int kBytes = sizeof(typename Tile::Element);
  for (int k_byte = 0; k_byte < OperandType::kSummed * kBytes; k_byte += 32) {
    const auto descriptor =
        Descriptor<OperandType>(base + BlockOffset<OperandType>(kFirst, 0) + BlockOffset<OperandType>(0, k_byte));
    for (int outer = 0; outer < kOuter; ++outer) {
      for (int k = 0; k < 32 / kBytes; ++k) {
        const int summed = k_byte / kBytes + k;
        const bool is_rows = OperandType::kIsKMajor == Tile::kIsRowMajor;
        const int expected = is_rows ? Tile::Offset(kFirst + outer, summed) : Tile::Offset(summed, kFirst + outer);
        if (HardwareByte<OperandType>(descriptor, outer, k, kBytes) != base + expected) return false;
      }
    }
  }
  return true;
}

template <class Tile>
__device__ constexpr bool IsPermutation() {
  constexpr int kBytes = sizeof(typename Tile::Element);
  bool is_taken[Tile::kRows * Tile::kColumns] = {};
  for (int row = 0; row < Tile::kRows; ++row) {
    for (int column = 0; column < Tile::kColumns; ++column) {
      const int offset = Tile::Offset(row, column);
      if (offset % kBytes || is_taken[offset / kBytes]) return false;
      is_taken[offset / kBytes] = true;
    }
  }
  return true;
}
"""


def compiles(assertions: str) -> None:
    toolchain.compile_lto_ir(_PROGRAM + assertions, arch="sm_90a", headers=source.device_headers())


TILES = [(64, 64), (64, 128), (128, 64), (64, 32), (64, 16), (96, 64), (16, 64), (64, 192), (64, 48)]


@pytest.mark.parametrize("is_row_major", [True, False])
@pytest.mark.parametrize("element", ["Bf16", "Tf32", "E4m3"])
def test_each_element_has_a_place_of_its_own(element, is_row_major):
    size = {"Bf16": 2, "Tf32": 4, "E4m3": 1}[element]
    checks = ""
    for rows, columns in TILES:
        if (columns if is_row_major else rows) * size % 32 == 0:
            tile = f"Tile<{element}, {rows}, {columns}, {str(is_row_major).lower()}, 128>"
            checks += f"static_assert(IsPermutation<{tile}>());\n"
    compiles(checks)


@pytest.mark.parametrize(("is_row_major", "outer_is_rows"), list(itertools.product([True, False], repeat=2)))
def test_descriptors_of_16_bit_operands_address_the_elements(is_row_major, outer_is_rows):
    checks = ""
    for rows, columns in TILES:
        tile = f"Tile<Bf16, {rows}, {columns}, {str(is_row_major).lower()}, 128>"
        operand = f"Operand<{tile}, {str(outer_is_rows).lower()}>"
        outer = rows if outer_is_rows else columns
        for first in range(0, outer, 64):
            checks += f"static_assert(Agrees<{operand}, {min(64, outer - first)}, {first}>(1024));\n"
    compiles(checks)


@pytest.mark.parametrize("element", ["Tf32", "E4m3"])
def test_descriptors_of_other_operands_address_the_elements(element):
    checks = ""
    for rows, columns in ((64, 32), (128, 64), (64, 128), (64, 96)):
        checks += f"static_assert(Agrees<Operand<Tile<{element}, {rows}, {columns}, true, 128>, true>, 64, 0>(2048));\n"
        checks += f"static_assert(Agrees<Operand<Tile<{element}, {columns}, {rows}, false, 128>, false>, 64, 0>(0));\n"
    compiles(checks)


def test_a_wrong_address_is_noticed():
    tile = "Tile<Bf16, 64, 64, true, 128>"
    with pytest.raises(LinkError, match="static assertion failed"):
        compiles(f"static_assert(Agrees<Operand<{tile}, true>, 64, 0>(512));\n")  # not at a multiple of 1024
