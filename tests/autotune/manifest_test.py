"""The kernel manifest: the kernels of an op are those of the file, in whatever layout, and are parsed when needed."""

from __future__ import annotations

import hashlib
import json
import random

import pytest
import small_package as small

from stoneware.errors import TableError
from stoneware.kernels import manifest
from stoneware.kernels.manifest import KernelRecord, Manifest, read_manifest, text_of


def record(id: str, op: str = "matmul", arch: str = "sm_90a", **config) -> dict:
    return {"id": id, "op": op, "backend": "sm90", "arch": arch, "config": config, "sha256": "s" + id, "size_bytes": 1}


def read(tmp_path, text: str) -> Manifest:
    path = tmp_path / "kernel_manifest.json"
    path.write_text(text)
    return read_manifest(path)


def of_kernels(tmp_path, *records: dict, **more) -> Manifest:
    return read(tmp_path, text_of({"schema": 1, "kernels": sorted(records, key=lambda one: one["id"]), **more}))


def test_each_op_has_its_kernels_also_where_those_of_others_are_in_between(tmp_path):
    records = [record(f"{letter}{idx}", random.choice(["x", "y", "z"])) for idx in range(9) for letter in "ab"]
    found = of_kernels(tmp_path, *records)
    for op in ("x", "y", "z", "none"):
        expected = {one["id"]: KernelRecord(**one) for one in records if one["op"] == op}
        assert found.of_op(op) == expected and list(found.of_op(op)) == sorted(expected)
        assert {kernel.id for kernel in found.select(op=op, backend="sm90")} == set(expected)
    assert dict(found.kernels) == {one["id"]: KernelRecord(**one) for one in records}


def test_a_kernel_is_found_by_its_id_alone(tmp_path):
    found = of_kernels(tmp_path, record("a"), record("ab", "x"), record("b", "x", note='"id": "c"'))
    assert [found.kernels[id].id for id in ("ab", "a", "b")] == ["ab", "a", "b"]
    assert not {"c", "", "a\n", 'a"'} & set(found.kernels)
    assert "c" not in found.kernels and "" not in found.kernels and found.kernels.get("sa") is None
    assert len(found.kernels) == 3


def test_fields_of_configs_and_of_other_lists_are_not_those_of_kernels(tmp_path):
    confusing = record("a") | {"config": {"id": "b", "op": "x", "nested": {"id": "c", "op": "x"}}}
    removed = [record("gone", "x")]
    opened = [{"name": "f", "sha256": "1", "size_bytes": 2, "kernels": ["a"]}]
    found = of_kernels(tmp_path, confusing, removed=removed, open=opened, left_out=["left"])
    assert found.of_op("x") == {} and list(found.of_op("matmul")) == list(found.kernels) == ["a"]
    assert found.kernels["a"].config["nested"] == {"id": "c", "op": "x"}
    assert "gone" not in found.kernels and found.lacks("gone") and found.lacks("left")
    assert found.open["a"].name == "f"


@pytest.mark.parametrize("indent", [None, 0, 2, 4])
def test_another_layout_has_the_same_kernels(tmp_path, indent):
    expected = read(tmp_path, small.manifest_text())
    document = {**json.loads(small.manifest_text()), "digest": ""}
    text = json.dumps(document, indent=indent)
    digest = hashlib.sha256(text.encode()).hexdigest()
    found = read(tmp_path, text.replace('"digest": ""', f'"digest": "{digest}"'))
    assert dict(found.kernels) == dict(expected.kernels) and found.digest == digest != expected.digest
    assert found.of_op("scaled_mm") == expected.of_op("scaled_mm")


def test_only_the_kernels_of_an_op_that_is_needed_are_parsed(tmp_path, monkeypatch):
    found = of_kernels(tmp_path, *(record(f"{op}{idx}", op) for op in ("x", "y") for idx in range(5)))
    parsed = []
    load = json.loads
    monkeypatch.setattr(manifest.json, "loads", lambda text: parsed.append(bytes(text).decode()) or load(text))
    assert len(found.select(op="x", backend="sm90")) == 5
    assert found.with_tile("x", "sm90", "x3")[0] is found.kernels["x3"]
    assert parsed and '"op": "y"' not in "".join(parsed)


def test_every_kernel_is_parsed_once_by_a_loop_and_not_again_by_id(tmp_path, monkeypatch):
    found = of_kernels(tmp_path, *(record(f"{op}{idx}", op) for op in ("x", "y") for idx in range(50)))
    parsed = []
    load = json.loads
    monkeypatch.setattr(manifest.json, "loads", lambda text: parsed.append(text) or load(text))
    assert len(list(found.kernels.values())) == 100 and len(parsed) == 1
    assert [found.kernels[id].id for id in found.kernels] == list(found.kernels) and len(parsed) == 1


def test_kernels_of_an_op_are_found_by_id_without_parsing_again(tmp_path, monkeypatch):
    found = of_kernels(tmp_path, *(record(f"x{idx}", "x") for idx in range(50)))
    expected = found.of_op("x")
    monkeypatch.setattr(manifest.json, "loads", None)
    assert all(found.kernels[id] is kernel for id, kernel in expected.items()) and "z" not in found.kernels


def test_an_invalid_kernel_is_refused_when_its_op_is_needed(tmp_path):
    found = of_kernels(tmp_path, record("a", "x"), record("b", "y", arch="volta"))
    assert found.kernels["a"].op == "x"
    for need in (lambda: found.of_op("y"), lambda: found.kernels["b"], lambda: len(found.kernels)):
        with pytest.raises(TableError, match=r"kernel_manifest.json: not a kernel manifest: ValueError: .*; reinstall"):
            need()


def test_a_kernel_that_stands_there_twice_is_refused(tmp_path):
    found = of_kernels(tmp_path, record("a"), record("a"), record("b", "x"))
    with pytest.raises(TableError, match="kernel id 'a' stands there twice"):
        found.of_op("matmul")


def test_a_manifest_without_kernels_has_none(tmp_path):
    found = of_kernels(tmp_path, left_out=["left"], removed=[record("gone")])
    assert len(found.kernels) == 0 and found.of_op("matmul") == {} and found.lacks("gone")
