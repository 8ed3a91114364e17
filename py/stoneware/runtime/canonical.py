"""JSON as the same bytes on every machine: sorted keys, ASCII, no NaN, floats as Python does."""

from __future__ import annotations

import json
from typing import Any


def canonical_json(value: Any) -> str:
    """JSON on one line with sorted keys and ASCII only: the same bytes on every machine."""
    return json.dumps(
        value, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":")
    )


def canonical_document(value: Any) -> str:
    """JSON over several lines with sorted keys and ASCII only, for files that people read."""
    return json.dumps(value, sort_keys=True, ensure_ascii=True, allow_nan=False, indent=1) + "\n"
