"""nvcc's undocumented orig_src_path_name flags still make output independent of the source's path.

When `with_flags` fails, a new nvcc has changed the flags (tools/build_rules/private/nvcc.bzl). When
`without_flags` fails, nvcc no longer needs them or the source no longer shows it: drop or adapt it.
STONEWARE_TEST_CANARY names the files of nvcc_canary.bzl.
"""

from __future__ import annotations

import os
import pathlib

import pytest

_NUM_FOLDERS = 2


def outputs(flags: str, extension: str) -> list[bytes]:
    paths = [pathlib.Path(path) for path in os.environ["STONEWARE_TEST_CANARY"].split()]
    found = [p for p in paths if p.parts[-3] == f"{flags}_path_flags" and p.suffix == extension]
    assert len(found) == _NUM_FOLDERS, paths
    return [path.read_bytes() for path in found]


@pytest.mark.parametrize("extension", [".cubin", ".o"])
def test_with_flags_two_folders_give_the_same_bytes(extension):
    first, second = outputs("with", extension)
    assert first == second


@pytest.mark.parametrize("extension", [".cubin", ".o"])
def test_without_flags_two_folders_give_different_bytes(extension):
    first, second = outputs("without", extension)
    assert first != second
