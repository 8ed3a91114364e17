"""A wheel as the tests see it: its members, its extension modules, its metadata."""

from __future__ import annotations

import dataclasses
import email
import email.message
import functools
import json
import pathlib
import zipfile


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuiltWheel:
    """One wheel file, read once."""

    path: pathlib.Path

    @functools.cached_property
    def entries(self) -> list[zipfile.ZipInfo]:
        """Entries of the archive, in its order."""
        with zipfile.ZipFile(self.path) as archive:
            return archive.infolist()

    @functools.cached_property
    def members(self) -> dict[str, bytes]:
        """Path in the wheel to content."""
        with zipfile.ZipFile(self.path) as archive:
            return {entry.filename: archive.read(entry) for entry in archive.infolist()}

    @property
    def modules(self) -> dict[str, bytes]:
        """The extension modules among the members."""
        return {path: data for path, data in self.members.items() if path.endswith(".so")}

    @property
    def tag(self) -> str:
        """Python, ABI and platform tag in the file's name."""
        return "-".join(self.path.stem.split("-")[2:])

    @property
    def processor(self) -> str:
        """What the platform tag ends with."""
        return "aarch64" if self.tag.endswith("_aarch64") else "x86_64"

    @property
    def info(self) -> str:
        """The .dist-info folder, by the file's name."""
        return "-".join(self.path.stem.split("-")[:2]) + ".dist-info"

    def header(self, name: str) -> email.message.Message:
        """METADATA or WHEEL."""
        return email.message_from_bytes(self.members[f"{self.info}/{name}"])

    @functools.cached_property
    def manifest(self) -> list[dict]:
        """The kernels of kernel_manifest.json."""
        return json.loads(self.members["stoneware/kernel_manifest.json"])["kernels"]
