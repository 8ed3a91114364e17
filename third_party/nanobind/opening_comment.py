"""Writes the text of a C header's opening comment, which states its licence: opening_comment HEADER OUT."""

import pathlib
import sys

header, out = map(pathlib.Path, sys.argv[1:])
comment, end, _ = header.read_text(encoding="utf-8").partition("*/")
if not comment.startswith("/**") or not end:
    sys.exit(f"opening_comment: {header} must open with a /** comment */")
lines = [line.strip().removeprefix("*").removeprefix(" ") for line in comment.removeprefix("/**").strip().splitlines()]
out.write_text("\n".join(lines) + "\n", encoding="utf-8")
