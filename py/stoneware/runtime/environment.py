"""Every STONEWARE_* variable that is read at run time, in one place.

    STONEWARE_CACHE_DIR   folder of the user's tuning store; by default
                          $XDG_CACHE_HOME/stoneware/tuning, else ~/.cache/stoneware/tuning
    STONEWARE_TUNING      off (default), on_miss or error_on_miss: the mode outside of any
                          `with sw.tuning(...)`
    STONEWARE_BATCH_INVARIANT
                          0 (default) or 1: whether a row's bits may not depend on the batch,
                          outside of any `with sw.batch_invariant()`
    STONEWARE_TILE_BACKWARD
                          0 or 1: whether gradients of tile matmuls are linked, outside of any
                          `with sw.tile.enable_backward(...)`; by default as the wheel was built
    STONEWARE_ENGINES_ON_CPU
                          0 (default) or 1: whether stoneware.integrations also offers vLLM and SGLang
                          the reference backend on a CPU, which is slow and for tests
    STONEWARE_ENGINES_EXPERTS
                          0 (default) or 1: whether mixtures of experts in vLLM and SGLang run on
                          sw.grouped_mm, which has not been measured against their kernels

They are read when they are needed, never at import. A change in a running process does not affect
plans that were made before; use `with sw.tuning(...)` to change the mode there.
"""

from __future__ import annotations

import os

from stoneware.errors import quoted

MODES = ("off", "on_miss", "error_on_miss")
"""What to do about a problem that was not measured: take the nearest, measure it, or raise."""


STORE_NAME = "samples.sqlite3"
"""The user's store in its folder."""


def tuning_folder() -> str | None:
    """The folder of the user's tuning store; None if the user has no home folder.

    A str, since every look-up calls this and a Path takes longer.

    Raises:
      ValueError: STONEWARE_CACHE_DIR is not absolute.
    """
    own = os.environ.get("STONEWARE_CACHE_DIR")
    if own:
        if not os.path.isabs(own):
            raise ValueError(
                f"STONEWARE_CACHE_DIR={quoted(own)} must be an absolute path, so that every process "
                "finds the same store; set it to one, or unset it"
            )
        return own
    # A relative path must be ignored (XDG Base Directory Specification, "Basics").
    cache = os.environ.get("XDG_CACHE_HOME")
    if cache and os.path.isabs(cache):
        return os.path.join(cache, "stoneware", "tuning")
    home = os.path.expanduser("~")
    return os.path.join(home, ".cache", "stoneware", "tuning") if os.path.isabs(home) else None


def tuning_mode() -> str:
    """The mode outside of any `with sw.tuning(...)`.

    Raises:
      ValueError: STONEWARE_TUNING is not one of MODES.
    """
    mode = os.environ.get("STONEWARE_TUNING") or "off"
    if mode not in MODES:
        raise ValueError(
            f"STONEWARE_TUNING={quoted(mode)} must be one of {', '.join(MODES)}; set it to one, or unset it"
        )
    return mode


def batch_invariant() -> bool:
    """Whether STONEWARE_BATCH_INVARIANT requires results whose bits do not depend on the batch.

    Raises:
      ValueError: it is neither 0 nor 1.
    """
    return _switch("STONEWARE_BATCH_INVARIANT")


def engines_on_cpu() -> bool:
    """Whether STONEWARE_ENGINES_ON_CPU lets inference engines run the reference backend on a CPU.

    Raises:
      ValueError: it is neither 0 nor 1.
    """
    return _switch("STONEWARE_ENGINES_ON_CPU")


def engines_experts() -> bool:
    """Whether STONEWARE_ENGINES_EXPERTS lets inference engines run experts on `sw.grouped_mm`.

    Raises:
      ValueError: it is neither 0 nor 1.
    """
    return _switch("STONEWARE_ENGINES_EXPERTS")


def _switch(name: str) -> bool:
    value = os.environ.get(name) or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{name}={quoted(value)} must be 0 or 1; set it to one, or unset it")
    return value == "1"


def tile_backward() -> bool | None:
    """Whether STONEWARE_TILE_BACKWARD has gradients of tile matmuls linked; None if it is not set.

    Raises:
      ValueError: it is neither 0 nor 1.
    """
    value = os.environ.get("STONEWARE_TILE_BACKWARD")
    if not value:
        return None
    if value not in ("0", "1"):
        raise ValueError(f"STONEWARE_TILE_BACKWARD={quoted(value)} must be 0 or 1; set it to one, or unset it")
    return value == "1"
