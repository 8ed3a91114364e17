"""Damage of every kind to the bytes of a file, by seed; for fuzz_test.py."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

GARBAGE = [
    b"",
    b"{",
    b"[" * 100_000,
    b"{}",
    b"null",
    b"NaN",
    b"-Infinity",
    b"1" * 10_000,
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b'{"key":' * 2000,
    b"\0" * 50,
    b'"\\ud800"',
    b'{"median_us":1e999}',
    b"\xe2\x80\xa8",
    b"\r",
    b"true",
    b'"\\u001b]0;x"',
]


def flip_bytes(rng: random.Random, content: bytearray) -> None:
    for _ in range(rng.choice([1, 1, 1, 5, 40])):
        content[rng.randrange(len(content))] = rng.randrange(256)


def flip_bits(rng: random.Random, content: bytearray) -> None:
    for _ in range(rng.choice([1, 1, 3])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def flip_in_header(rng: random.Random, content: bytearray) -> None:
    content[rng.randrange(min(len(content), 120))] = rng.randrange(256)


def cut(rng: random.Random, content: bytearray) -> None:
    del content[rng.randrange(len(content)) :]


def overwrite(rng: random.Random, content: bytearray) -> None:
    begin = rng.randrange(len(content))
    length = min(rng.choice([16, 512, 4096, 9000]), len(content) - begin)
    content[begin : begin + length] = rng.choice([bytes(length), b"\xff" * length, rng.randbytes(length)])


def overwrite_page(rng: random.Random, content: bytearray) -> None:
    page = rng.randrange(len(content) // 4096 + 1) * 4096
    other = rng.randrange(len(content) // 4096 + 1) * 4096
    content[page : page + 4096] = content[other : other + 4096]


def splice(rng: random.Random, content: bytearray) -> None:
    begin = rng.randrange(len(content))
    content[begin : begin + rng.randrange(3000)] = rng.choice(GARBAGE)


def swap(rng: random.Random, content: bytearray) -> None:
    first, second = sorted(rng.randrange(len(content)) for _ in range(2))
    length = rng.randrange(1, 2000)
    a, b = content[first : first + length], content[second : second + length]
    content[second : second + length], content[first : first + length] = a, b


def garbage_line(rng: random.Random, content: bytearray) -> None:
    lines = bytes(content).split(b"\n")
    lines.insert(rng.randrange(len(lines)), rng.choice(GARBAGE))
    content[:] = b"\n".join(lines)


def swap_lines(rng: random.Random, content: bytearray) -> None:
    lines = bytes(content).split(b"\n")
    rng.shuffle(lines)
    content[:] = b"\n".join(lines)


def wrong_value(rng: random.Random, content: bytearray) -> None:
    """One value of one JSON line becomes another type, or its key comes twice."""
    lines = bytes(content).split(b"\n")
    idx = rng.randrange(len(lines))
    try:
        document = json.loads(lines[idx])
    except (ValueError, RecursionError):  # an earlier mutation may have nested it
        return
    if not isinstance(document, dict) or not document:
        return
    name = rng.choice(sorted(document))
    value = rng.choice(
        [None, True, -1, 10**400, 1e308, "x", [], {}, [[]], {"op": 1}, "\ud800:x", "x" * 5000, "\x1b[2J", 2.0]
    )
    if rng.random() < 0.2:
        lines[idx] = lines[idx][:-1] + f',"{name}":1}}'.encode()
    else:
        if document[name] and isinstance(document[name], dict) and rng.random() < 0.7:
            name, document_part = rng.choice(sorted(document[name])), document[name]
            document_part[name] = value
        else:
            document[name] = value
        lines[idx] = json.dumps(document).encode()
    content[:] = b"\n".join(lines)


Mutation = Callable[[random.Random, bytearray], None]
OF_BYTES: list[Mutation] = [flip_bytes, flip_bits, flip_in_header, cut, overwrite, overwrite_page, splice, swap]
OF_TEXT: list[Mutation] = [*OF_BYTES, garbage_line, swap_lines, wrong_value]


def mutated(seed: int, content: bytes, mutations: list[Mutation]) -> bytes:
    rng = random.Random(seed)
    changed = bytearray(content)
    for mutation in rng.choices(mutations, k=rng.choice([1, 1, 1, 2, 4])):
        if changed:
            mutation(rng, changed)
    return bytes(changed)
