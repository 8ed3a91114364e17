"""The kernel manifest: which kernels the wheel carries, for which archs, with their digests.

`digest` is the sha256 of the file with an empty digest (`text_of`), so that a damaged or edited
manifest is refused whole: it is what every kernel's own digest is compared with.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from stoneware.errors import TableError, UnsupportedError, quoted
from stoneware.kernels.key import ELEMENT_BYTES
from stoneware.runtime import package_files, regular_file
from stoneware.runtime.fast_dataclass import dataclass

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class KernelRecord:
    """One cubin; or a kernel that is removed from the build, which has no digests.

    Attributes:
      id: unique name of the kernel.
      op: "scaled_mm" or "matmul".
      backend: "sm90" or "triton_aot".
      arch: as the compiler names it, such as "sm_90a".
      config: what the kernel was built from (dtypes, tile, schedule, ...).
      sha256: digest of the cubin, or of the fat binary that an embedded one is compressed in; it is checked before
        the kernel is loaded.
      code_sha256: digest of what the GPU executes of it; empty in a manifest without.
      size_bytes: size of the same.
      description_sha256: digest of the launch description, `cubins/<id>.json`; empty for a kernel
        that has none.
      serves: the matmuls that it can compute, "forward", "dgrad" and "wgrad", and whether it does
        in this build: not a gradient's where backward is off for it.
    """

    id: str
    op: str
    backend: str
    arch: str
    config: Mapping[str, Any]
    sha256: str = ""
    size_bytes: int = 0
    code_sha256: str = ""
    description_sha256: str = ""
    serves: Mapping[str, bool] = field(default_factory=dict)

    @property
    def measured_sha256(self) -> str:
        """What its measurements carry: they stay true as long as the code is the same."""
        return self.code_sha256 or self.sha256

    @property
    def dtypes(self) -> tuple[Any, Any, Any]:
        """The dtypes of a, b and the result."""
        return self.config.get("a"), self.config.get("b"), self.config.get("out")

    @functools.cached_property
    def compute_capability(self) -> tuple[int, int]:
        """(9, 0) for "sm_90" and "sm_90a", (12, 0) for "sm_120"."""
        digits = self.arch.removeprefix("sm_").rstrip("af")
        return int(digits[:-1]), int(digits[-1])


@dataclass(frozen=True, kw_only=True)
class OpenKernels:
    """A file of LTO-IR, `open_kernels/<name>`, with kernels that call an epilogue which is linked later.

    Attributes:
      name, sha256, size_bytes: of the file.
    """

    name: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Manifest:
    """The kernels of a build.

    Attributes:
      kernels: by id.
      left_out: ids of those that its kernel set leaves out.
      removed: those that serve gradients alone and are off, by id.
      has_backward: whether the build is for gradients, what `--//:enable_backward` says.
      digest: of the manifest's file; empty for one that was made otherwise.
      open: id of a kernel that is open too -> its file.
    """

    kernels: Mapping[str, KernelRecord]
    left_out: frozenset[str] = frozenset()
    removed: Mapping[str, KernelRecord] = field(default_factory=dict)
    has_backward: bool = True
    digest: str = ""
    open: Mapping[str, OpenKernels] = field(default_factory=dict)

    def lacks(self, kernel: str) -> bool:
        """Whether a kernel of this id exists, and is not in this build on purpose."""
        return kernel in self.left_out or kernel in self.removed

    def kernel(self, id: str, backend: str) -> KernelRecord:
        """The kernel of this id; raises UnsupportedError if the backend has none."""
        found = self.kernels.get(id)
        if found is None or found.backend != backend:
            raise UnsupportedError(
                f"kernel={quoted(id)} must be the id of a {backend} kernel in kernel_manifest.json; "
                "stoneware.explain(...) lists those that fit a problem"
            )
        return found

    def select(self, *, op: str, backend: str) -> list[KernelRecord]:
        """The kernels of one op and backend."""
        return [kernel for kernels in self.by_arch(op=op, backend=backend).values() for kernel in kernels]

    def by_arch(self, *, op: str, backend: str) -> Mapping[tuple[int, int], Sequence[KernelRecord]]:
        """The same by compute capability, sorted by id."""
        return self._by_arch.get((op, backend), {})

    def with_tile(self, op: str, backend: str, tile: str) -> Sequence[KernelRecord]:
        """The kernels of a tile, each of other dtypes."""
        return self._by_tile.get((op, backend, tile), ())

    @functools.cached_property
    def _by_tile(self) -> dict[tuple[str, str, str], list[KernelRecord]]:
        groups: dict[tuple[str, str, str], list[KernelRecord]] = {}
        for kernel in self.kernels.values():
            groups.setdefault((kernel.op, kernel.backend, tile_of(kernel.id)), []).append(kernel)
        return groups

    @functools.cached_property
    def configs(self) -> dict[Any, Any]:
        """The configs of candidates that `candidate.configs` kept."""
        return {}

    @functools.cached_property
    def _by_arch(self) -> dict[tuple[str, str], dict[tuple[int, int], list[KernelRecord]]]:
        """Every `by_arch`, since each look-up needs several."""
        groups: dict[tuple[str, str], dict[tuple[int, int], list[KernelRecord]]] = {}
        for kernel in self.kernels.values():
            by_arch = groups.setdefault((kernel.op, kernel.backend), {})
            by_arch.setdefault(kernel.compute_capability, []).append(kernel)
        return groups


@functools.lru_cache(maxsize=1024)
def tile_of(kernel: str) -> str:
    """The name of a kernel's tile, its id without dtypes."""
    return "_".join(part for part in kernel.split("_") if part not in ELEMENT_BYTES)


def text_of(document: Mapping[str, Any]) -> str:
    """A manifest's file, with its digest; the build's write_manifest.py writes the same."""
    text = json.dumps({**document, "digest": ""}, sort_keys=True, indent=1) + "\n"
    return text.replace('"digest": ""', f'"digest": "{_digest(text.encode("ascii"))}"', 1)


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def read_manifest(path: str | os.PathLike[str], remedy: str = package_files.REMEDY) -> Manifest:
    """Reads a kernel_manifest.json.

    Raises:
      TableError: the file is missing or no regular file, is not a manifest, is damaged or edited,
        or names a kernel twice.
    """
    try:
        text = regular_file.read(path)
        data = json.loads(text.decode("utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema={quoted(data['schema'])} must be {SCHEMA}")
        expected = data["digest"]
        found = _digest(text.replace(f'"digest": "{expected}"'.encode(), b'"digest": ""', 1))
        if found != expected:
            raise TableError(
                f"{path}: expected content with the digest {expected}, found content with {found}; {remedy}"
            )
        records = [KernelRecord(**kernel) for kernel in data["kernels"]]
        for record in records:
            _ = record.compute_capability  # raises for an invalid arch
        left_out = frozenset(map(str, data.get("left_out", ())))
        removed = {kernel["id"]: KernelRecord(**kernel) for kernel in data.get("removed", ())}
        has_backward = {"on": True, "off": False}[data.get("backward", "on")]
        open_kernels = {
            id: OpenKernels(name=file["name"], sha256=file["sha256"], size_bytes=file["size_bytes"])
            for file in data.get("open", ())
            for id in file["kernels"]
        }
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise TableError(f"{path}: not a kernel manifest: {type(error).__name__}: {error}; {remedy}") from error
    kernels = {record.id: record for record in sorted(records, key=lambda record: record.id)}
    if len(kernels) != len(records):
        raise TableError(f"{path}: a kernel id stands there twice; {remedy}")
    return Manifest(kernels, left_out, removed, has_backward, expected, open_kernels)


@functools.cache
def packaged() -> Manifest:
    """The manifest of this installation, read once.

    Raises:
      TableError: see `read_manifest`.
    """
    return read_manifest(package_files.path("kernel_manifest.json"))


def installed() -> Manifest | None:
    """Like `packaged`; None without a manifest, for example in a checkout, where nothing is built.

    Raises:
      TableError: like `packaged`, except for a missing file.
    """
    is_built = package_files.path("kernel_manifest.json").exists()
    return packaged() if is_built else None
