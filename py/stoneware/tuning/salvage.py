"""Salvage: the records that are still in the bytes of a damaged SQLite file or of its -wal.

SQLite is not asked. Each place where a record begins is tried; what its digest proves is returned.
A record longer than a page continues on overflow pages, which are followed
(https://www.sqlite.org/fileformat2.html, sections 1.6 and 4.1).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from stoneware.tuning.record import HEADER, ID_LENGTH, Record, record_at

DEFAULT_PAGE_BYTES = 4096
"""SQLite's default since 3.12, which the store keeps; used where the header is gone."""

DATABASE_MAGIC = b"SQLite format 3\0"
"""How a database begins."""

WAL_MAGICS = (0x377F0682, 0x377F0683)
"""How a -wal begins; the odd one if its checksums are big-endian."""

_WAL_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24


def scan(data: bytes, *, is_wal: bool = False) -> Iterator[Record]:
    """Every record in the bytes of a database file or of its -wal that proves itself.

    One record may come several times, in several revisions: pages of a -wal repeat, and SQLite
    leaves old rows in free space.
    """
    # The default too: the header that gives the size may be what is damaged.
    sizes = dict.fromkeys((_page_bytes(data, is_wal), DEFAULT_PAGE_BYTES))
    layouts = [_Pages(data, is_wal, page_bytes) for page_bytes in sizes]
    position = 0
    while header := HEADER.search(data, position):
        length = int(header[4])
        record = record_at(header, data[header.end():header.end() + length])
        # What was found whole is stepped over, so that no record inside its text is believed.
        position = header.start() + 1 if record is None else header.end() + length
        if record is None and length <= len(data):
            bodies = (pages.body(header, length) for pages in layouts)
            record = next(filter(None, (record_at(header, body) for body in bodies)), None)
        if record is not None:
            yield record


class _Pages:
    """The bytes of a file as pages, to follow a record over overflow pages."""

    def __init__(self, data: bytes, is_wal: bool, page_bytes: int) -> None:
        self._data = data
        self._first, self._gap = (_WAL_HEADER_BYTES, _FRAME_HEADER_BYTES) if is_wal else (0, 0)
        self._page_bytes = page_bytes
        self._frames: dict[int, list[int]] | None = None

    def body(self, header: re.Match[bytes], length: int) -> bytes:
        """The body of a record that is longer than what its page holds; b"" if it cannot be."""
        text_bytes = header.end() - header.start() + length
        # A row is a header, the id and the text; the header gives its own size and a type for
        # each: 13 + 2 * length of a text, as varints.
        types = 13 + 2 * ID_LENGTH, 13 + 2 * text_bytes
        row_header_bytes = 1 + sum(map(_varint_bytes, types))
        row_bytes = row_header_bytes + ID_LENGTH + text_bytes
        local = _local_bytes(row_bytes, self._page_bytes) - row_header_bytes - ID_LENGTH
        if local >= text_bytes or local < header.end() - header.start():
            return b""
        end = header.start() + local
        parts = [self._data[header.end():end]]
        missing = text_bytes - local
        frame_idx = (header.start() - self._first) // (self._page_bytes + self._gap)
        while missing > 0:
            page = self._page(int.from_bytes(self._data[end:end + 4], "big"), frame_idx)
            if page is None:
                return b""
            parts.append(self._data[page + 4:page + 4 + min(missing, self._page_bytes - 4)])
            missing -= self._page_bytes - 4
            end = page
        return b"".join(parts)

    def _page(self, number: int, near_idx: int) -> int | None:
        """Where the page begins; of several frames of a -wal, the one nearest to `near_idx`."""
        if not self._gap:
            begin = (number - 1) * self._page_bytes
            return begin if 0 <= begin < len(self._data) else None
        stride = self._page_bytes + self._gap
        if self._frames is None:
            self._frames = {}
            for idx, begin in enumerate(range(self._first, len(self._data), stride)):
                page = int.from_bytes(self._data[begin:begin + 4], "big")
                self._frames.setdefault(page, []).append(idx)
        frames = self._frames.get(number)
        if not frames:
            return None
        nearest = min(frames, key=lambda idx: abs(idx - near_idx))
        return self._first + nearest * stride + self._gap


def _page_bytes(data: bytes, is_wal: bool) -> int:
    if is_wal and int.from_bytes(data[:4], "big") in WAL_MAGICS:
        size = int.from_bytes(data[8:12], "big")
    elif not is_wal and data.startswith(DATABASE_MAGIC):
        size = int.from_bytes(data[16:18], "big")
        size = 65536 if size == 1 else size
    else:
        size = DEFAULT_PAGE_BYTES
    is_possible = 512 <= size <= 65536 and size & (size - 1) == 0
    return size if is_possible else DEFAULT_PAGE_BYTES


def _local_bytes(row_bytes: int, page_bytes: int) -> int:
    """How much of a row is on its leaf page; the rest is on overflow pages."""
    most = page_bytes - 35
    if row_bytes <= most:
        return row_bytes
    least = (page_bytes - 12) * 32 // 255 - 23
    local = least + (row_bytes - least) % (page_bytes - 4)
    return local if local <= most else least


def _varint_bytes(value: int) -> int:
    return max(1, -(-value.bit_length() // 7))
