"""The cache server keeps what is put, in the layout of Bazel's disk cache, and nothing else."""

from __future__ import annotations

import contextlib
import http.client
import os
import pathlib
import urllib.error
import urllib.request

import cache_server
import pytest

_NAME = "ab" + "0" * 62
# Two pools of Bazel's, 100 connections each.
_NUM_KEPT_OPEN = 200
_PATIENCE_S = 20


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    return tmp_path / "cache"


@pytest.fixture
def address(folder):
    with cache_server.serve(folder) as address:
        yield address


def request(address: str, path: str, method: str = "GET", data: bytes | None = None) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address + path, data, method=method)) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.parametrize("kind", ["ac", "cas"])
def test_what_is_put_is_given_back(address, folder, kind):
    data = os.urandom(3 << 20)
    assert request(address, f"/{kind}/{_NAME}") == (404, b"")
    assert request(address, f"/{kind}/{_NAME}", "PUT", data) == (201, b"")
    assert request(address, f"/{kind}/{_NAME}") == (200, data)
    assert [path for path in folder.rglob("*") if path.is_file()] == [folder / kind / "ab" / _NAME]


def test_connections_that_bazel_keeps_open_do_not_delay_others(address):
    with contextlib.ExitStack() as kept:
        for _ in range(_NUM_KEPT_OPEN):
            connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=_PATIENCE_S)
            kept.callback(connection.close)
            connection.request("GET", f"/cas/{_NAME}")
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 404


def test_an_empty_file_is_a_file(address):
    assert request(address, f"/cas/{_NAME}", "PUT", b"")[0] == 201
    assert request(address, f"/cas/{_NAME}") == (200, b"")


def test_a_disk_cache_is_served(address, folder):
    (folder / "cas/ab").mkdir(parents=True)
    (folder / "cas/ab" / _NAME).write_bytes(b"from the disk cache")
    assert request(address, f"/cas/{_NAME}") == (200, b"from the disk cache")


@pytest.mark.parametrize(
    "path", ["/", "/cas", "/cas/..", "/cas/ab/../../x", f"/other/{_NAME}", f"/cas/{_NAME.upper()}"]
)
@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_other_paths_are_not_there(address, folder, path, method):
    assert request(address, path, method, b"x" if method == "PUT" else None)[0] == 404
    assert list(folder.iterdir()) == []


def test_other_methods_are_refused(address):
    assert request(address, f"/cas/{_NAME}", "DELETE")[0] == 405
