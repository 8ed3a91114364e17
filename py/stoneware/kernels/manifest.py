"""The kernel manifest: which kernels the wheel carries, for which archs, with their digests.

`digest` is the sha256 of the file with an empty digest (`text_of`), so that a damaged or edited
manifest is refused whole: it is what every kernel's own digest is compared with.

A process needs the kernels of the ops that it calls, at its first call of each. So the kernels of an op are parsed when
one of them is needed (`_Kernels`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    def of_op(self, op: str) -> Mapping[str, KernelRecord]:
        """The kernels of one op, by id."""
        if isinstance(self.kernels, _Kernels):
            return self.kernels.of_op(op)
        return {id: kernel for id, kernel in self.kernels.items() if kernel.op == op}

    def select(self, *, op: str, backend: str) -> list[KernelRecord]:
        """The kernels of one op and backend."""
        return [kernel for kernels in self.by_arch(op=op, backend=backend).values() for kernel in kernels]

    def by_arch(self, *, op: str, backend: str) -> Mapping[tuple[int, int], Sequence[KernelRecord]]:
        """The same by compute capability, sorted by id."""
        if op not in self._by_arch:
            groups: dict[str, dict[tuple[int, int], list[KernelRecord]]] = {}
            for kernel in self.of_op(op).values():
                by_arch = groups.setdefault(kernel.backend, {})
                by_arch.setdefault(kernel.compute_capability, []).append(kernel)
            self._by_arch[op] = groups
        return self._by_arch[op].get(backend, {})

    def with_tile(self, op: str, backend: str, tile: str) -> Sequence[KernelRecord]:
        """The kernels of a tile, each of other dtypes."""
        if op not in self._by_tile:
            groups: dict[tuple[str, str], list[KernelRecord]] = {}
            for kernel in self.of_op(op).values():
                groups.setdefault((kernel.backend, tile_of(kernel.id)), []).append(kernel)
            self._by_tile[op] = groups
        return self._by_tile[op].get((backend, tile), ())

    @functools.cached_property
    def configs(self) -> dict[Any, Any]:
        """The configs of candidates that `candidate.configs` kept."""
        return {}

    @functools.cached_property
    def _by_arch(self) -> dict[str, dict[str, dict[tuple[int, int], list[KernelRecord]]]]:
        """Op -> backend -> every `by_arch`, since each look-up needs several."""
        return {}

    @functools.cached_property
    def _by_tile(self) -> dict[str, dict[tuple[str, str], list[KernelRecord]]]:
        """Op -> every `with_tile`."""
        return {}


class _Kernels(Mapping[str, KernelRecord]):
    """The records of a file by id; those of an op are parsed together when one of them is needed.

    Args:
      text: the records as `text_of` writes them, without brackets around them.
      refused: makes the error for records that are not valid.

    Raises:
      TableError: records that are needed are not valid.
    """

    def __init__(self, text: bytes, refused: Callable[[Exception], TableError]) -> None:
        self._text, self._refused = text, refused
        self._of_op: dict[str, dict[str, KernelRecord]] = {}
        self._by_id: dict[str, KernelRecord | None] = {}
        """What was parsed, and None for ids that the file lacks."""

    def of_op(self, op: str) -> Mapping[str, KernelRecord]:
        """The records of one op."""
        if op not in self._of_op:
            line = _line("op", op)
            first, last = self._text.find(line), self._text.rfind(line)
            # The list is sorted by id, so there are few others in between.
            kernels = self._around(first, last) if last >= 0 else {}
            self._of_op[op] = {id: kernel for id, kernel in kernels.items() if kernel.op == op}
            self._by_id.update(self._of_op[op])
        return self._of_op[op]

    def __getitem__(self, id: str) -> KernelRecord:
        if id not in self._by_id:
            place = self._text.find(_line("id", id))
            if place >= 0:
                self.of_op(self._around(place, place)[id].op)
            self._by_id.setdefault(id, None)
        kernel = self._by_id[id]
        if kernel is None:
            raise KeyError(id)
        return kernel

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @functools.cached_property
    def _all(self) -> dict[str, KernelRecord]:
        kernels = self._parsed(0, len(self._text))
        for id, kernel in kernels.items():
            self._by_id.setdefault(id, kernel)
        return kernels

    def _around(self, first: int, last: int) -> dict[str, KernelRecord]:
        """The records from the one around a place to the one around another."""
        begin, end = self._text.rfind(_BEGIN_OF_RECORD, 0, first), self._text.find(_END_OF_RECORD, last)
        return self._parsed(begin, end + len(_END_OF_RECORD))

    def _parsed(self, begin: int, end: int) -> dict[str, KernelRecord]:
        try:
            return _by_id(json.loads(b"[" + self._text[begin:end] + b"]"))
        except _INVALID as error:
            raise self._refused(error) from error


_INVALID = (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)
"""What reading a file raises that is not a manifest."""

_BEGIN, _END = b'\n "kernels": [\n', b"\n ]"
_BEGIN_OF_RECORD, _END_OF_RECORD = b"\n  {", b"\n  }"
"""What `text_of` writes around the records and around each of them: it indents each level by a space."""


def _line(field: str, value: str) -> bytes:
    """How the line of a record's field begins; only these have three spaces before them."""
    return f'\n   "{field}": {json.dumps(value)}'.encode()


def _by_id(records: Sequence[Mapping[str, Any]]) -> dict[str, KernelRecord]:
    """The records, sorted by id.

    Raises:
      ValueError, TypeError, AttributeError: one is not valid, or an id is there twice.
    """
    kernels: dict[str, KernelRecord] = {}
    for record in sorted((KernelRecord(**fields) for fields in records), key=lambda record: record.id):
        _ = record.compute_capability  # raises for an invalid arch
        if record.id in kernels:
            raise ValueError(f"kernel id {quoted(record.id)} stands there twice")
        kernels[record.id] = record
    return kernels


@functools.lru_cache(maxsize=1024)
def tile_of(kernel: str) -> str:
    """The name of a kernel's tile, its id without dtypes."""
    return "_".join(part for part in kernel.split("_") if part not in ELEMENT_BYTES)


def text_of(document: Mapping[str, Any]) -> str:
    """A manifest's file, with its digest; the build's write_manifest.py writes the same."""
    text = json.dumps({**document, "digest": ""}, sort_keys=True, indent=1) + "\n"
    return text.replace('"digest": ""', f'"digest": "{_digest(text.encode("ascii"), "")}"', 1)


def _digest(text: bytes, listed: str) -> str:
    """The digest of a file that lists this one, as if it listed none."""
    entry = f'"digest": "{listed}"'.encode()
    begin = text.find(entry) + len(entry) - len(listed) - 1
    digest = hashlib.sha256(memoryview(text)[:begin])  # without a copy of the rest
    digest.update(memoryview(text)[begin + len(listed) :])
    return digest.hexdigest()


def read_manifest(path: str | os.PathLike[str], remedy: str = package_files.REMEDY) -> Manifest:
    """Reads a kernel_manifest.json.

    Raises:
      TableError: the file is missing or no regular file, is not a manifest, is damaged or edited,
        or names a kernel twice. Kernels of a file with the right digest raise it when they are needed.
    """

    def refused(error: Exception) -> TableError:
        return TableError(f"{path}: not a kernel manifest: {type(error).__name__}: {error}; {remedy}")

    try:
        text = regular_file.read(path)
        before = text.find(_BEGIN)
        begin, end = before + len(_BEGIN) - 1, text.find(_END, before) if before >= 0 else -1
        # Without the records, if the layout is that of `text_of`.
        data = json.loads(text if end < 0 else text[:begin] + text[end:])
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema={quoted(data['schema'])} must be {SCHEMA}")
        expected = data["digest"]
        found = _digest(text, expected)
        if found != expected:
            raise TableError(
                f"{path}: expected content with the digest {expected}, found content with {found}; {remedy}"
            )
        kernels = _by_id(data["kernels"]) if end < 0 else _Kernels(text[begin:end], refused)
        left_out = frozenset(map(str, data.get("left_out", ())))
        removed = {kernel["id"]: KernelRecord(**kernel) for kernel in data.get("removed", ())}
        has_backward = {"on": True, "off": False}[data.get("backward", "on")]
        open_kernels: dict[str, OpenKernels] = {}
        for file in data.get("open", ()):
            opened = OpenKernels(name=file["name"], sha256=file["sha256"], size_bytes=file["size_bytes"])
            open_kernels |= dict.fromkeys(file["kernels"], opened)
    except _INVALID as error:
        raise refused(error) from error
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
