"""The table: parsed entry by entry, of ops and of decorated kernels; what is wrong in it is refused."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import struct

import pytest
import small_package as small
from small_kernel import NEW, OLD, OP, kernel_config, kernel_sample, write_kernel

from stoneware.errors import TableError
from stoneware.kernels.config import Config, KernelConfig
from stoneware.tuning import differences, lookup, table_file, table_view
from stoneware.tuning.bake import bake
from stoneware.tuning.sources import Source
from stoneware.tuning.table import Table

BIG, TINY = small.sm90(small.BIG), small.sm90(small.TINY)


def test_only_the_entry_that_is_asked_is_parsed(tmp_path, monkeypatch):
    samples = [small.sample(TINY, 10.0, m=m, scales=scales) for m in (1, 16) for scales in ("row", "tensor")]
    baked = small.bake_samples(tmp_path, samples)
    parsed = []
    whole = table_view.json.loads
    monkeypatch.setattr(table_view.json, "loads", lambda text: parsed.append(text) or whole(text))
    device = baked.devices[0]
    assert device.num_entries == 4
    assert parsed == []
    assert small.entry_of(device, small.key(m=16)).choices[0].config == TINY
    assert len(parsed) == 1
    small.entry_of(device, small.key(m=1))
    assert len(parsed) == 2, "each entry by itself"
    assert small.entry_of(device, small.key(m=116)) is small.entry_of(device, small.key(m=6)) is None
    assert len(parsed) == 2


def test_every_entry_comes_back(tmp_path):
    samples = [
        small.sample(config, us, m=m, n=n, spread_us=0.25)
        for m in (1, 16, 512)
        for n in (2112, 4096)
        for config, us in ((TINY, 9.5), (BIG, 12.5))
    ]
    device = small.bake_samples(tmp_path, samples).devices[0]
    entries = {entry.key: entry for entry in device.entries()}
    assert len(entries) == 6
    for sample in samples:
        [choice] = [one for one in entries[sample.key].choices if one.config == sample.config]
        assert (choice.median_us, choice.spread_us, choice.run) == (sample.median_us, sample.spread_us, "run-1")
        assert small.entry_of(device, sample.key) == entries[sample.key]
    assert small.entry_of(device, small.key(m=2)) is None
    assert small.entry_of(device, small.key(out_dtype="fp32")) is None


def test_decorated_kernel_is_baked_and_read_under_a_name_without_a_colon(tmp_path):
    files = write_kernel(
        tmp_path, [kernel_sample(64, 9.0), kernel_sample(128, 7.0), kernel_sample(256, 5.0, status="hung")]
    )
    assert files[0].name == "acme.kernels.softmax.jsonl"
    assert table_file.file_name(OP) == "acme.kernels.softmax.table"
    baked = table_file.decode(bake(OP, files), "x", OP)
    entry = small.entry_of(baked.devices[0], kernel_sample(64, 1.0).key)
    assert [choice.config for choice in entry.choices] == [kernel_config(128), kernel_config(64)]
    assert entry.kernel_sha256 == NEW


def test_samples_of_two_sources_of_a_kernel_stay_apart(tmp_path):
    runs = [small.run("run-1", date="2026-11-22"), small.run("run-2", date="2026-11-21")]
    files = write_kernel(
        tmp_path,
        [kernel_sample(64, 9.0), kernel_sample(128, 7.0), kernel_sample(64, 1.0, sha256=OLD, run="run-2")],
        runs=runs,
    )
    device = table_file.decode(bake(OP, files), "x", OP).devices[0]
    key = kernel_sample(64, 1.0).key

    def chosen(sha256):
        choice = small.entry_of(device, key, sha256).choices[0]
        return choice.config, choice.is_stale

    assert chosen(NEW) == (kernel_config(128), False)
    assert chosen(OLD) == (kernel_config(64), False)
    assert chosen("c" * 64) == (kernel_config(128), True), "the newest, and stale"
    assert device.num_entries == 1


def test_kernel_in_a_file_of_another_op_is_refused(tmp_path):
    files = small.write_device(tmp_path, [kernel_sample(64, 1.0)])
    with pytest.raises(TableError) as caught:
        bake("scaled_mm", files, small.manifest())
    assert f"jsonl:2: op={OP!r} in a file of scaled_mm; move the sample to " in str(caught.value)


def test_other_op_than_ours_and_missing_manifest_are_refused():
    message = "op='conv' must be one of scaled_mm, matmul, grouped_mm, or a decorated kernel"
    with pytest.raises(ValueError, match=message):
        bake("conv", [], small.manifest())
    with pytest.raises(ValueError, match="manifest=None"):
        bake("scaled_mm", [])


def test_sample_of_the_kernel_as_it_is_now_comes_before_a_newer_one_of_other_bytes(tmp_path):
    runs = [small.run("old", date="2026-11-21"), small.run("new", date="2026-11-22")]
    baked = small.bake_samples(
        tmp_path,
        [small.sample(TINY, 10.0, run="old"), small.sample(TINY, 5.0, run="new", kernel_sha256="0" * 64)],
        runs=runs,
    )
    [choice] = small.entry_at(baked, m=16).choices
    assert (choice.run, choice.is_stale) == ("old", False)


def test_file_that_is_too_large_to_be_a_table_is_refused_unread(tmp_path):
    path = tmp_path / "scaled_mm.table"
    with path.open("wb") as file:
        file.truncate(20 * 2**30)  # sparse: it takes no place on the disk
    with pytest.raises(TableError, match="it has 21474836480 bytes, and at most"):
        table_file.read(path, "scaled_mm")
    assert differences.verify(path) != []


NUM_MUTATIONS = 400
ODD = (
    None,
    True,
    -1,
    0,
    1,
    2,
    7,
    2**31,
    2**63,
    10**400,
    1.5,
    -0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\ud800",
    "e4m3",
    [],
    [[]],
    [1, 2, 3],
    ["x"],
    {},
    {"op": "x"},
    {"backend": "vendor"},
)


def with_digest(header: dict, body: bytes) -> bytes:
    """A table's bytes with a digest that fits."""

    def line(digest: str) -> bytes:
        return json.dumps({**header, "digest": digest}, sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n"

    return line(hashlib.sha256(line("") + body).hexdigest()) + body


def change_header(draw: random.Random, header: dict) -> None:
    """Changes, removes or doubles some value of the header, at any depth."""
    places = []

    def walk(node: object) -> None:
        items = node.items() if isinstance(node, dict) else (enumerate(node) if isinstance(node, list) else ())
        for name, value in items:
            if name not in ("digest", "schema"):
                places.append((node, name))
            walk(value)

    walk(header)
    node, name = draw.choice(places)
    kind = draw.randrange(6)
    if kind == 0:
        del node[name]
    elif kind == 1 and isinstance(node, list):
        node.append(node[name])
    elif kind == 2 and type(node[name]) is int:
        node[name] += draw.choice((-8, -1, 1, 8))
    else:
        node[name] = draw.choice(ODD)


def change_body(draw: random.Random, body: bytes) -> bytes:
    """Changes a number of a column or a text, or cuts something off."""
    changed = bytearray(body)
    at = draw.randrange(len(body))
    kind = draw.randrange(4)
    if kind == 0:
        changed[at] = draw.choice(b'\x00\x01\xff-0129eN[]{}",')
    elif kind == 1:
        at -= at % 4
        changed[at : at + 8] = struct.pack("<q", draw.choice((-1, 0, 1, 2**31, 2**62)))
    elif kind == 2:
        at -= at % 4
        changed[at : at + 8] = struct.pack("<d", draw.choice((0.0, -1.0, 1e-320, 1e300, float("nan"), float("inf"))))
    else:
        del changed[at : at + draw.choice((1, 8, 10**6))]
    return bytes(changed[: len(body)])


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """op -> bytes of a table: one with models, and one of a decorated kernel."""
    samples = [
        small.sample(config, us * (1 + n * k / 1e7) * (1 + m / 100), m=m, n=n, k=k)
        for n, k in itertools.product((2048, 4096, 8192), (2048, 4096))
        for m in (1, 16, 64, 512)
        for config, us in ((BIG, 14.0), (TINY, 9.0), (small.triton(), 11.0), (small.VENDOR, 12.0))
    ]
    files = small.write_device(tmp_path_factory.mktemp("op"), samples)
    of_kernel = write_kernel(
        tmp_path_factory.mktemp("kernel"),
        [kernel_sample(64, 9.0), kernel_sample(128, 7.0), kernel_sample(64, 5.0, m=512)],
    )
    return {"scaled_mm": bake("scaled_mm", files, small.manifest()), OP: bake(OP, of_kernel)}


def ask(table: Table) -> None:
    """Asks what any caller might; raises TableError, or finds answers that can be used."""
    if table.op == OP:
        keys = [kernel_sample(64, 1.0, m=m).key for m in (1, 16, 100)]
    else:
        keys = [
            small.key(m=m, n=n, k=k, out_dtype=out)
            for m, n, k in ((16, 4096, 4096), (40, 4096, 4096), (300, 5120, 3072), (1, 64, 64))
            for out in ("bf16", "fp16")
        ]
    for device in (small.H200, small.H100):
        for key in keys:
            for found in lookup.answers(key, device, [Source("overlay", table)]):
                for choice in found.entry.choices:
                    assert math.isfinite(choice.median_us) and choice.median_us > 0
                    assert isinstance(choice.config, Config | KernelConfig)
                assert json.dumps(dict(found.runs))


@pytest.mark.parametrize("op", ["scaled_mm", OP])
@pytest.mark.parametrize("part", ["header", "body"])
def test_wrong_contents_with_a_right_digest_are_refused_or_answer(good, op, part, tmp_path):
    line, _, body = good[op].partition(b"\n")
    path = tmp_path / "t.table"
    assert with_digest(json.loads(line), body) == good[op]
    refused = 0
    for seed in range(NUM_MUTATIONS // 4):
        draw, header, changed = random.Random(seed), json.loads(line), body
        for _ in range(draw.choice((1, 1, 1, 3))):
            if part == "header":
                change_header(draw, header)
            else:
                changed = change_body(draw, changed)
        path.write_bytes(with_digest(header, changed))
        problems = differences.verify(path)
        try:
            ask(table_file.read(path, op))
        except TableError as error:
            refused += 1
            assert problems, f"seed {seed}: verify calls good what a look-up refuses: {error}"
    assert refused, "a program that damages nothing proves nothing"
