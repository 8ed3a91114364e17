"""The SBOM is valid SPDX 2.3, lists what is compiled in as it is locked, and has the digest of the kernel manifest."""

from __future__ import annotations

import datetime
import hashlib
import os
import pathlib
import re

import pytest
from spdx_tools.spdx.model import ChecksumAlgorithm, Document, Package, RelationshipType
from spdx_tools.spdx.parser.json.json_parser import parse_from_file
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

_WHEEL = "SPDXRef-stoneware"
_COMPILED_IN = {
    "libcxx",
    "libcxxabi",
    "libunwind",
    "nanobind",
    "nvidia-cuda-cccl",
    "nvidia-cuda-crt",
    "nvidia-cuda-runtime",
    "nvidia-cutlass",
    "robin-map",
    "ziglang",
}
# Names in NOTICE, where they differ.
_NOTICE_NAMES = {
    "libcxx": "libc++",
    "libcxxabi": "libc++abi",
    "nvidia-cutlass": "CUTLASS",
    "robin-map": "robin_map",
    "ziglang": "Zig",
}
_TOOLS = {"nvidia-cuda-nvcc", "nvidia-nvvm", "triton"}


@pytest.fixture
def sbom(wheel, tmp_path) -> Document:
    file = tmp_path / "stoneware.spdx.json"
    file.write_bytes(wheel.members[f"{wheel.info}/sboms/stoneware.spdx.json"])
    return parse_from_file(str(file))


@pytest.fixture(scope="module")
def locked() -> dict[str, tuple[str, dict[str, str]]]:
    """WHEELS of lock.bzl, which is also Python."""
    scope: dict = {}
    exec(pathlib.Path(os.environ["STONEWARE_TEST_LOCK"]).read_text(encoding="utf-8"), scope)
    return scope["WHEELS"]


def packages(sbom: Document) -> dict[str, Package]:
    return {package.name: package for package in sbom.packages}


def related(sbom: Document, kind: RelationshipType, **ends: str) -> set[str]:
    """Ids at the other end of the relationships of a kind; `of` or `to` names one end."""
    pairs = [(r.spdx_element_id, r.related_spdx_element_id) for r in sbom.relationships if r.relationship_type == kind]
    if "of" in ends:
        return {to.removeprefix("SPDXRef-") for of, to in pairs if of == ends["of"]}
    return {of.removeprefix("SPDXRef-") for of, to in pairs if to == ends["to"]}


def sha256s(checksums) -> set[str]:
    return {checksum.value for checksum in checksums if checksum.algorithm == ChecksumAlgorithm.SHA256}


def test_it_is_the_only_sbom(wheel):
    found = [path for path in wheel.members if path.startswith(f"{wheel.info}/sboms/")]
    assert found == [f"{wheel.info}/sboms/stoneware.spdx.json"]


def test_it_is_valid_spdx_2_3(sbom):
    assert sbom.creation_info.spdx_version == "SPDX-2.3"
    assert [problem.validation_message for problem in validate_full_spdx_document(sbom)] == []


def test_it_describes_this_wheel(wheel, sbom):
    assert related(sbom, RelationshipType.DESCRIBES, of="SPDXRef-DOCUMENT") == {"stoneware"}
    described = packages(sbom)["stoneware"]
    assert described.version == wheel.header("METADATA")["Version"]
    words = [set(re.findall(r"[\w.-]+", str(text))) for text in (
        described.license_declared, wheel.header("METADATA")["License-Expression"],
    )]  # fmt: skip
    assert words[0] == words[1]


def test_it_does_not_depend_on_the_day(sbom):
    assert sbom.creation_info.created == datetime.datetime(1980, 1, 1)


def test_it_lists_what_is_compiled_in_and_what_compiles(sbom):
    assert related(sbom, RelationshipType.CONTAINS, of=_WHEEL) == _COMPILED_IN
    assert related(sbom, RelationshipType.BUILD_TOOL_OF, to=_WHEEL) == _TOOLS
    assert set(packages(sbom)) == {"stoneware"} | _COMPILED_IN | _TOOLS
    assert related(sbom, RelationshipType.CONTAINS, of="SPDXRef-nanobind") == {"robin-map"}
    assert related(sbom, RelationshipType.CONTAINS, of="SPDXRef-ziglang") == {"libcxx", "libcxxabi", "libunwind"}


def test_versions_and_digests_are_those_of_the_lock(sbom, locked):
    compared = {name: package for name, package in packages(sbom).items() if name in locked}
    assert set(compared) == (_COMPILED_IN | _TOOLS) - {"robin-map", "libcxx", "libcxxabi", "libunwind"}
    for name, package in compared.items():
        version, files = locked[name]
        assert package.version == version
        assert sha256s(package.checksums) == set(files.values())
        assert [reference.locator for reference in package.external_references] == [f"pkg:pypi/{name}@{version}"]


def test_notice_names_what_is_compiled_in_with_the_same_licence(wheel, sbom):
    notice = wheel.members[f"{wheel.info}/licenses/NOTICE"].decode()
    entries = re.findall(r"^(\S[^()\n]*) \(([^)]+)\)", notice, re.MULTILINE)
    licences = {name: licence for names, licence in entries for name in re.findall(r"[\w+-]+", names)}
    for name in _COMPILED_IN:
        declared = str(packages(sbom)[name].license_declared)
        assert (name, licences.get(_NOTICE_NAMES.get(name, name))) == (name, declared)


def macros(variable: str, pattern: str) -> list[str]:
    text = pathlib.Path(os.environ[variable]).read_text(encoding="utf-8")
    return re.findall(rf"#\s*define {pattern}", text)


def test_versions_of_parts_are_those_of_their_headers(sbom):
    robin_map = macros("STONEWARE_TEST_ROBIN_MAP", r"TSL_RH_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)")
    assert packages(sbom)["robin-map"].version == ".".join(robin_map)
    (libcxx,) = macros("STONEWARE_TEST_LIBCXX", r"_LIBCPP_VERSION (\d+)")
    major, minor = divmod(int(libcxx) // 100, 100)
    assert {packages(sbom)[name].version for name in ("libcxx", "libcxxabi", "libunwind")} == {f"{major}.{minor}"}


def test_it_has_the_digest_of_the_kernel_manifest(wheel, sbom):
    (manifest,) = sbom.files
    assert manifest.name == "./stoneware/kernel_manifest.json"
    assert sha256s(manifest.checksums) == {hashlib.sha256(wheel.members["stoneware/kernel_manifest.json"]).hexdigest()}
    assert related(sbom, RelationshipType.METAFILE_OF, to=_WHEEL) == {manifest.spdx_id.removeprefix("SPDXRef-")}
