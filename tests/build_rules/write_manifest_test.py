"""The manifest has digest and size of every cubin, and its own digest, in canonical JSON.

STONEWARE_TEST_WRITE_MANIFEST names the program.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess

import pytest


def kernel(id: str, cubin: str) -> dict:
    return {"id": id, "op": "add", "backend": "none", "arch": "sm_90", "config": {"tile": [1, 2]},
            "cubin": cubin}


def without_digest(text: str) -> dict:
    manifest = json.loads(text)
    assert len(manifest.pop("digest")) == 64
    return manifest


@pytest.fixture
def write(tmp_path):
    """Runs the program on a list of kernels; returns the manifest's text."""
    program = os.path.abspath(os.environ["STONEWARE_TEST_WRITE_MANIFEST"])

    def run(kernels: list[dict]) -> str:
        (tmp_path / "kernels.json").write_text(json.dumps(kernels))
        subprocess.run(
            [program, "--kernels=kernels.json", "--out=manifest.json"], check=True, cwd=tmp_path
        )
        return (tmp_path / "manifest.json").read_text()

    (tmp_path / "b.cubin").write_bytes(b"\x7fELF b")
    (tmp_path / "a.cubin").write_bytes(b"\x7fELF a, longer")
    return run


def test_manifest_has_digest_and_size_and_drops_the_path(write):
    data = b"\x7fELF a, longer"
    text = write([kernel("a", "a.cubin")])
    assert without_digest(text) == {"schema": 1, "kernels": [{
        "id": "a", "op": "add", "backend": "none", "arch": "sm_90", "config": {"tile": [1, 2]},
        "sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data),
    }]}
    assert ".cubin" not in text


def test_manifest_does_not_depend_on_the_order_of_kernels(write):
    kernels = [kernel("b", "b.cubin"), kernel("a", "a.cubin")]
    text = write(kernels)
    assert [entry["id"] for entry in json.loads(text)["kernels"]] == ["a", "b"]
    assert write(kernels[::-1]) == text


def test_manifest_is_canonical_json(write):
    text = write([kernel("a", "a.cubin")])
    assert text == json.dumps(json.loads(text), sort_keys=True, indent=1) + "\n"


def test_manifest_of_no_kernels_is_a_manifest(write):
    assert without_digest(write([])) == {"schema": 1, "kernels": []}


def test_launch_description_has_its_digest_and_only_a_kernel_that_has_one(write, tmp_path):
    (tmp_path / "a.json").write_text('{"symbol": "a"}')
    kernels = [{**kernel("a", "a.cubin"), "description": "a.json"}, kernel("b", "b.cubin")]
    first, second = without_digest(write(kernels))["kernels"]
    assert first["description_sha256"] == hashlib.sha256(b'{"symbol": "a"}').hexdigest()
    assert "description" not in first
    assert "description_sha256" not in second


def test_digest_is_that_of_the_canonical_content(write):
    manifest = json.loads(write([kernel("a", "a.cubin")]))
    content = json.dumps({**manifest, "digest": ""}, sort_keys=True, separators=(",", ":"))
    assert manifest["digest"] == hashlib.sha256(content.encode("ascii")).hexdigest()
