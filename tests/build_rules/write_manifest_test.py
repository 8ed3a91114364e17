"""The manifest has digest and size of every cubin, and its own digest, in canonical JSON.

STONEWARE_TEST_WRITE_MANIFEST names the program.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import struct
import subprocess

import pytest

PROGBITS = 1
NOBITS = 8


def kernel(id: str, cubin: str) -> dict:
    return {"id": id, "op": "add", "backend": "none", "arch": "sm_90", "config": {"tile": [1, 2]}, "cubin": cubin}


def listing(kernels: list[dict], left_out=(), removed=(), backward="on", open_files=()) -> dict:
    return {"backward": backward, "kernels": kernels, "left_out": left_out, "open": open_files, "removed": removed}


def elf(sections: dict[str, bytes | int]) -> bytes:
    """A cubin of these sections; an int is the size of one that has no content."""
    names, content, headers = b"\0", b"", [bytes(64)]
    for name, data in {**sections, ".shstrtab": b""}.items():
        names_before, names = names, names + name.encode() + b"\0"
        data = names if name == ".shstrtab" else data
        is_reserved = isinstance(data, int)
        size = data if is_reserved else len(data)
        headers.append(
            struct.pack(
                "<IIQQQQIIQQ",
                len(names_before),
                NOBITS if is_reserved else PROGBITS,
                0,
                0,
                64 + len(content),
                size,
                0,
                0,
                1,
                0,
            )
        )
        content += b"" if is_reserved else data
    head = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01",
        2,
        190,
        1,
        0,
        0,
        64 + len(content),
        0,
        64,
        0,
        0,
        64,
        len(headers),
        len(headers) - 1,
    )
    return head + content + b"".join(headers)


KERNEL_SECTIONS = {".text.k": b"code", ".nv.info.k": b"info", ".nv.constant0.k": b"params", ".nv.shared.k": 1024}


def digest_of(*sections: tuple[str, int, bytes]) -> str:
    return hashlib.sha256(
        b"".join(prefix.encode() + b"\0" + size.to_bytes(8, "little") + content for prefix, size, content in sections)
    ).hexdigest()


def without_digest(text: str) -> dict:
    manifest = json.loads(text)
    assert len(manifest.pop("digest")) == 64
    return manifest


@pytest.fixture
def write(tmp_path):
    """Runs the program on a list of kernels; returns the manifest's text."""
    program = os.path.abspath(os.environ["STONEWARE_TEST_WRITE_MANIFEST"])

    def run(kernels: list[dict], **others: list | str) -> str:
        (tmp_path / "kernels.json").write_text(json.dumps(listing(kernels, **others)))
        subprocess.run([program, "--kernels=kernels.json", "--out=manifest.json"], check=True, cwd=tmp_path)
        return (tmp_path / "manifest.json").read_text()

    (tmp_path / "b.cubin").write_bytes(elf({".text.b": b"b"}))
    (tmp_path / "a.cubin").write_bytes(elf({".text.a": b"a, longer"}))
    return run


def test_manifest_has_digest_and_size_and_drops_the_path(write):
    data = elf({".text.a": b"a, longer"})
    text = write([kernel("a", "a.cubin")])
    assert without_digest(text) == {
        "schema": 1,
        "backward": "on",
        "kernels": [
            {
                "id": "a",
                "op": "add",
                "backend": "none",
                "arch": "sm_90",
                "config": {"tile": [1, 2]},
                "sha256": hashlib.sha256(data).hexdigest(),
                "size_bytes": len(data),
                "code_sha256": digest_of((".text.", 9, b"a, longer")),
            }
        ],
    }
    assert ".cubin" not in text


def test_an_embedded_kernel_has_the_digest_and_size_of_its_image_and_of_its_code(write, tmp_path):
    (tmp_path / "a.fatbin").write_bytes(b"compressed")
    [listed] = json.loads(write([kernel("a", "a.cubin") | {"image": "a.fatbin"}]))["kernels"]
    assert (listed["sha256"], listed["size_bytes"]) == (hashlib.sha256(b"compressed").hexdigest(), 10)
    assert listed["code_sha256"] == digest_of((".text.", 9, b"a, longer"))
    assert "image" not in listed


def test_files_of_open_kernels_have_name_digest_and_size(write, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/z.fatbin").write_bytes(b"z")
    (tmp_path / "y.fatbin").write_bytes(b"yy")
    files = [{"file": "folder/z.fatbin", "kernels": ["b", "a"]}, {"file": "y.fatbin", "kernels": ["c"]}]
    assert json.loads(write([], open_files=files))["open"] == [
        {"name": "y.fatbin", "kernels": ["c"], "size_bytes": 2, "sha256": hashlib.sha256(b"yy").hexdigest()},
        {"name": "z.fatbin", "kernels": ["a", "b"], "size_bytes": 1, "sha256": hashlib.sha256(b"z").hexdigest()},
    ]


def test_manifest_does_not_depend_on_the_order_of_kernels(write):
    kernels = [kernel("b", "b.cubin"), kernel("a", "a.cubin")]
    text = write(kernels)
    assert [entry["id"] for entry in json.loads(text)["kernels"]] == ["a", "b"]
    assert write(kernels[::-1]) == text


def test_manifest_is_canonical_json(write):
    text = write([kernel("a", "a.cubin")])
    assert text == json.dumps(json.loads(text), sort_keys=True, indent=1) + "\n"


def test_manifest_of_no_kernels_is_a_manifest(write):
    assert without_digest(write([])) == {"schema": 1, "backward": "on", "kernels": []}


def test_manifest_lists_the_kernels_that_are_left_out(write):
    text = write([], left_out=["b", "a"])
    assert without_digest(text) == {"schema": 1, "backward": "on", "kernels": [], "left_out": ["a", "b"]}


def test_manifest_lists_the_kernels_that_are_removed(write):
    b, a = ({"id": id, "op": "add", "serves": {"wgrad": False}} for id in "ba")
    text = write([], removed=[b, a], backward="off")
    assert without_digest(text) == {"schema": 1, "backward": "off", "kernels": [], "removed": [a, b]}


def test_launch_description_has_its_digest_and_only_a_kernel_that_has_one(write, tmp_path):
    (tmp_path / "a.json").write_text('{"symbol": "a"}')
    kernels = [{**kernel("a", "a.cubin"), "description": "a.json"}, kernel("b", "b.cubin")]
    first, second = without_digest(write(kernels))["kernels"]
    assert first["description_sha256"] == hashlib.sha256(b'{"symbol": "a"}').hexdigest()
    assert "description" not in first
    assert "description_sha256" not in second


def test_digest_is_that_of_the_text_with_an_empty_digest(write):
    text = write([kernel("a", "a.cubin")])
    digest = json.loads(text)["digest"]
    assert digest == hashlib.sha256(text.replace(digest, "").encode("ascii")).hexdigest()


@pytest.fixture
def code_sha256(write, tmp_path):
    """The digest of the code of a cubin with these sections."""

    def run(sections: dict[str, bytes | int], id: str = "k") -> str:
        (tmp_path / "k.cubin").write_bytes(elf(sections))
        (entry,) = without_digest(write([kernel(id, "k.cubin")]))["kernels"]
        return entry["code_sha256"]

    return run


def test_code_digest_is_that_of_the_kernel_s_sections_in_a_fixed_order(code_sha256):
    expected = digest_of(
        (".text.", 4, b"code"), (".nv.info.", 4, b"info"), (".nv.constant0.", 6, b"params"), (".nv.shared.", 1024, b"")
    )
    assert code_sha256(KERNEL_SECTIONS) == expected
    assert code_sha256(dict(reversed(KERNEL_SECTIONS.items()))) == expected


def test_code_digest_does_not_depend_on_names_and_notes(code_sha256):
    renamed = {name[:-1] + "another": data for name, data in KERNEL_SECTIONS.items()}
    others = {".symtab": b"s", ".nv.info": b"i", ".nv.global": 3, ".nv.constant4": b"0000"}
    assert code_sha256(renamed | others, "another") == code_sha256(KERNEL_SECTIONS)


@pytest.mark.parametrize("name", KERNEL_SECTIONS)
def test_code_digest_depends_on_every_section_of_the_kernel(code_sha256, name):
    changed = 2048 if name == ".nv.shared.k" else b"other"
    assert code_sha256(KERNEL_SECTIONS | {name: changed}) != code_sha256(KERNEL_SECTIONS)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"text", "must begin as a 64-bit ELF file"),
        (elf({".text.k": b"code"})[:-100], "ends early"),
        (elf({".data": b"code"}), "must have a section .text.KERNEL"),
    ],
)
def test_what_is_no_cubin_is_refused(tmp_path, data, words):
    (tmp_path / "k.cubin").write_bytes(data)
    assert words in error_of(tmp_path, kernel("k", "k.cubin"))


def error_of(folder: pathlib.Path, record: dict) -> str:
    """What the program prints when it refuses a kernel of this folder."""
    (folder / "kernels.json").write_text(json.dumps(listing([record])))
    program = os.path.abspath(os.environ["STONEWARE_TEST_WRITE_MANIFEST"])
    result = subprocess.run(
        [program, "--kernels=kernels.json", "--out=manifest.json"], cwd=folder, capture_output=True, text=True
    )
    assert result.returncode != 0
    assert not (folder / "manifest.json").exists()
    return result.stderr


def test_cubin_without_the_symbol_of_its_id_is_refused(tmp_path):
    (tmp_path / "k.cubin").write_bytes(elf({".text.other": b"code", ".text.another": b"code"}))
    error = error_of(tmp_path, kernel("k", "k.cubin"))
    assert "k.cubin: kernel_id='k' must be the symbol of a kernel in the cubin, which has another, other" in error
    assert 'declare the kernel extern "C" __global__ under this name, or correct kernel_id' in error
    assert "Traceback" not in error
