"""Compiled kernels on disk: whole or not there, checked, bounded, this user's, never in the way."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoneware.kernels.launch_description import LaunchDescription
from stoneware.runtime import environment, private_folder
from stoneware.triton_autotune import cache

LAUNCH = LaunchDescription(
    symbol="kernel", parameters="PiPP", block_threads=128, shared_bytes=1024, arguments=("a", "n")
)
CUBIN = bytes(range(256)) * 8
FROM = {"kernel": "0" * 64, "options": [["num_warps", "int 4"]]}
NAME = cache.digest(FROM)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("STONEWARE_CACHE_DIR", str(tmp_path / "tuning"))
    monkeypatch.setattr(cache.FILES, "reported", set())
    return tmp_path / "tuning" / "kernels"


def path(folder):
    return folder / f"{NAME}.kernel"


def write(name=NAME, cubin=CUBIN):
    cache.write(name, LAUNCH, cubin, FROM)


def test_what_is_written_is_read(folder):
    assert cache.read(NAME) is None
    write()
    assert cache.read(NAME) == (LAUNCH, CUBIN)
    assert os.listdir(folder) == [f"{NAME}.kernel"]


def test_a_file_says_in_text_what_it_was_compiled_from(folder):
    write()
    header = json.loads(path(folder).read_bytes().split(b"\n")[1])
    assert header["compiled_from"] == FROM and header["launch"]["symbol"] == "kernel"


def test_every_input_of_the_compiler_changes_the_name():
    other = [
        {**FROM, "kernel": "1" * 64},
        {**FROM, "options": [["num_warps", "int 8"]]},
        {**FROM, "triton": "3.7.0"},
        {"kernel": FROM["kernel"]},
    ]
    assert len({NAME, *map(cache.digest, other)}) == 5


@given(position=st.integers(0, 1 << 20), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(tmp_path_factory, position, bit):
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("tuning")
        patch.setenv("STONEWARE_CACHE_DIR", str(root))
        write()
        file = path(root / "kernels")
        data = bytearray(file.read_bytes())
        data[position % len(data)] ^= 1 << bit
        file.write_bytes(data)
        assert cache.read(NAME) is None


@pytest.mark.parametrize("kept", [0, 1, 64, 65, 66, 200, 400, -1], ids=lambda kept: f"{kept}_bytes")
def test_a_truncated_file_is_found(folder, kept):
    write()
    path(folder).write_bytes(path(folder).read_bytes()[:kept])
    assert cache.read(NAME) is None


def test_a_file_of_another_kernel_is_found(folder):
    other = cache.digest({"kernel": "f" * 64})
    write(other)
    os.rename(folder / f"{other}.kernel", path(folder))
    assert cache.read(NAME) is None


def test_damage_is_reported_once_and_healed_by_the_next_write(folder, caplog):
    write()
    path(folder).write_bytes(b"not a kernel")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert cache.read(NAME) is None
    assert len(caplog.records) == 1 and str(path(folder)) in caplog.text
    write()
    assert cache.read(NAME) == (LAUNCH, CUBIN)


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"name": 3}', b"[" * 100_000, b"\xff\xfe"])
def test_a_header_that_is_no_launch_is_found(folder, content):
    """With a right digest, as someone might write who knows the format."""
    import hashlib

    folder.mkdir(parents=True)
    rest = content + b"\n" + CUBIN
    path(folder).write_bytes(hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
    assert cache.read(NAME) is None


@pytest.mark.parametrize(
    "change",
    [
        {"symbol": ""},
        {"symbol": 3},
        {"parameters": "Px"},
        {"block_threads": 0},
        {"block_threads": 2048},
        {"block_threads": True},
        {"shared_bytes": -1},
        {"shared_bytes": 1 << 40},
        {"arguments": "an"},
        {"arguments": [1]},
    ],
    ids=str,
)
def test_a_launch_that_breaks_a_rule_is_refused(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))}=.* must be "):
        LaunchDescription.from_json({**vars(LAUNCH), **change})


@pytest.mark.parametrize("parameters", ["P", "PiPi"])
def test_parameters_besides_the_arguments_are_pointers(parameters):
    launch = dataclasses.replace(LAUNCH, parameters=parameters)
    with pytest.raises(ValueError, match=f"parameters='{parameters}' must be 2 arguments"):
        launch.num_scratch(2)
    cache.write(NAME, launch, CUBIN, FROM)
    assert cache.read(NAME) is None


def test_the_folder_is_bounded_and_the_oldest_go_first(folder, monkeypatch):
    monkeypatch.setattr(cache.FILES, "most_bytes", 10 * (len(CUBIN) + 500))
    names = [cache.digest({"kernel": str(idx)}) for idx in range(30)]
    for idx, name in enumerate(names):
        write(name)
        os.utime(folder / f"{name}.kernel", ns=(idx, idx))
    total = sum(file.stat().st_size for file in folder.iterdir())
    assert total <= cache.FILES.most_bytes + len(CUBIN) + 500
    left = [name for name in names if cache.read(name)]
    assert left == names[-len(left) :] and left


def test_what_killed_processes_left_counts_and_goes(folder, monkeypatch):
    write()
    (folder / ".stoneware-abc").write_bytes(bytes(1 << 20))
    os.utime(folder / ".stoneware-abc", ns=(1, 1))
    monkeypatch.setattr(cache.FILES, "most_bytes", 1 << 19)
    write(cache.digest({}))
    assert not (folder / ".stoneware-abc").exists()
    assert cache.read(NAME) is not None


def test_a_killed_write_leaves_the_old_file(folder, monkeypatch):
    write()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write(cubin=b"other")
    assert cache.read(NAME) == (LAUNCH, CUBIN)
    assert os.listdir(folder) == [f"{NAME}.kernel"]


def test_a_folder_that_cannot_be_made_is_reported_once_and_costs_nothing_else(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STONEWARE_CACHE_DIR", str(tmp_path / "file" / "below"))
    with caplog.at_level(logging.WARNING):
        write()
        write()
        assert cache.read(NAME) is None
    assert sum("STONEWARE_CACHE_DIR" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702, 0o720, 0o1777], ids=oct)
def test_a_folder_that_others_can_write_is_neither_read_nor_written(folder, caplog, mode):
    """Whoever can write there could have a kernel of theirs launched."""
    write()
    folder.chmod(mode)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert cache.read(NAME) is None
            write(cache.digest({}))
    assert os.listdir(folder) == [f"{NAME}.kernel"]
    assert len(caplog.records) == 1
    assert str(folder) in caplog.text and f"mode is {mode:04o}" in caplog.text
    assert "chmod 700" in caplog.text
    folder.chmod(0o755)
    assert cache.read(NAME) == (LAUNCH, CUBIN)


def test_a_folder_of_another_user_is_neither_read_nor_written(folder, monkeypatch, caplog):
    write()
    status = os.stat(folder)
    of_another = os.stat_result((*status[:4], os.geteuid() + 1, *status[5:]))
    monkeypatch.setattr(private_folder.os, "stat", lambda path: of_another)
    with caplog.at_level(logging.WARNING):
        assert cache.read(NAME) is None
        write(cache.digest({}))
    assert os.listdir(folder) == [f"{NAME}.kernel"]
    assert len(caplog.records) == 1 and "must belong to user" in caplog.text


def test_a_folder_of_root_is_read(folder, monkeypatch):
    """As in an image that was made with its kernels. Root could write anywhere anyway."""
    write()
    status = os.stat(folder)
    of_root = os.stat_result((*status[:4], 0, *status[5:]))
    monkeypatch.setattr(private_folder.os, "stat", lambda path: of_root)
    monkeypatch.setattr(private_folder.os, "geteuid", lambda: 12345)
    assert private_folder.why_untrusted(folder) is None


def test_folders_are_made_for_this_user_alone(folder):
    before = os.umask(0)
    try:
        write()
    finally:
        os.umask(before)
    for made in (folder, folder.parent):
        assert made.stat().st_mode & 0o777 == 0o700
    assert path(folder).stat().st_mode & 0o777 == 0o600


def test_without_a_home_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(environment, "tuning_folder", lambda: None)
    write()
    assert cache.read(NAME) is None


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
