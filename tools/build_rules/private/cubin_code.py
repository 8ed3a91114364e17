"""A digest of the code in a cubin that the GPU executes, without its names and notes.

The same kernel from a source that is arranged in another way has another symbol table, but the same
code; measurements of it stay true.
"""

import hashlib
import struct
from collections.abc import Iterable

# Sections of one kernel, named prefix + symbol, in the order in which the digest takes them: the code
# (for sm_100 and later in a second form, too), how the driver has to launch it, its constants and its
# shared memory.
_PREFIXES = (
    ".text.",
    ".nv.capmerc.text.",
    ".nv.info.",
    ".nv.constant0.",
    ".nv.constant1.",
    ".nv.constant2.",
    ".nv.constant3.",
    ".nv.constant4.",
    ".nv.shared.",
)

# ELF-64: e_shoff, and e_shentsize, e_shnum and e_shstrndx; sh_name, sh_type, sh_offset and sh_size.
_MAGIC = b"\x7fELF\x02\x01"
_SECTION_TABLE_AT = 40
_SECTION_COUNTS_AT = 58
_SECTION_HEADER = struct.Struct("<II16xQQ")
_SHT_NOBITS = 8


def kernels(cubin: bytes) -> list[str]:
    """The symbols of a cubin's kernels, sorted. Raises ValueError if these are no bytes of a cubin."""
    return _kernels(_sections(cubin))


def code_sha256(cubin: bytes) -> str:
    """sha256 of the kernels' sections: for each kernel by symbol, for each prefix that it has.

    A section counts as its prefix, a zero byte, its size in 8 bytes, least first, and its content, of
    which one that only reserves memory has none. Raises ValueError if these are no bytes of a cubin.
    """
    sections = _sections(cubin)
    symbols = _kernels(sections)
    if not symbols:
        raise ValueError("a cubin must have a section .text.KERNEL, but this one has none")
    digest = hashlib.sha256()
    for kernel in symbols:
        for prefix in _PREFIXES:
            if prefix + kernel in sections:
                size, content = sections[prefix + kernel]
                digest.update(prefix.encode() + b"\0" + size.to_bytes(8, "little") + content)
    return digest.hexdigest()


def _kernels(sections: Iterable[str]) -> list[str]:
    return sorted(name.removeprefix(".text.") for name in sections if name.startswith(".text."))


def _sections(cubin: bytes) -> dict[str, tuple[int, bytes]]:
    """Size and content of each section, by its name."""
    if not cubin.startswith(_MAGIC):
        raise ValueError(f"a cubin must begin as a 64-bit ELF file, but begins {cubin[:6]!r}")
    try:
        (table,) = struct.unpack_from("<Q", cubin, _SECTION_TABLE_AT)
        entry_bytes, num_sections, names_idx = struct.unpack_from("<HHH", cubin, _SECTION_COUNTS_AT)
        headers = [_SECTION_HEADER.unpack_from(cubin, table + idx * entry_bytes) for idx in range(num_sections)]
        names_at = headers[names_idx][2]
        return {
            cubin[names_at + name : cubin.index(b"\0", names_at + name)].decode(): (
                size,
                b"" if kind == _SHT_NOBITS else cubin[offset : offset + size],
            )
            for name, kind, offset, size in headers
        }
    except (struct.error, IndexError) as error:
        raise ValueError(f"a cubin must be a whole ELF file, but this one ends early: {error}") from error
