"""Opens a page in headless Chromium: the DOM after its scripts ran, or its picture.

For tests that depend on //third_party/chromium:headless_chromium. There is no network; a page must
carry what it shows.
"""

from __future__ import annotations

import pathlib
import re
import subprocess

# Both repositories lie side by side in the runfiles of a test.
_PROGRAM = pathlib.Path(__file__).absolute().parents[3] / "stoneware_chromium/headless_shell"
# Timers and animations of a page get this long; it passes as fast as the page lets it.
_VIRTUAL_TIME_MS = 5000
# As Chromium logs an exception of a script that nothing caught.
_UNCAUGHT = re.compile(r':CONSOLE:\d+\] "(Uncaught .*)$', re.MULTILINE)


class PageError(Exception):
    """The page cannot be opened, or a script of it failed; the message says which."""


def dom(page: pathlib.Path, *, timeout_s: float = 60) -> str:
    """The page's DOM as HTML, once it is loaded, its scripts and timers have run.

    Raises:
      PageError: there is no such page, a script threw an exception, or Chromium failed.
      subprocess.TimeoutExpired: it took longer than `timeout_s`.
    """
    return _open(page, ["--dump-dom"], timeout_s)


def screenshot(
    page: pathlib.Path, picture: pathlib.Path, *, width: int = 1280, height: int = 800, timeout_s: float = 60
) -> None:
    """Writes what a window of `width` by `height` pixels shows of the page, as PNG.

    Raises:
      as `dom`.
    """
    _open(page, [f"--screenshot={picture.absolute()}", f"--window-size={width},{height}"], timeout_s)
    if not picture.exists():
        raise PageError(f"Chromium must have written {picture}, but did not; is its folder writable?")


def _open(page: pathlib.Path, options: list[str], timeout_s: float) -> str:
    if not page.is_file():  # Chromium would show an empty page.
        raise PageError(f"a page must be a file, but {page} is none; pass the path of an HTML file")
    result = subprocess.run(
        [
            _PROGRAM,
            "--enable-logging=stderr",
            "--log-level=0",
            f"--virtual-time-budget={_VIRTUAL_TIME_MS}",
            *options,
            page.resolve().as_uri(),
        ],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=timeout_s,
    )
    if result.returncode:
        raise PageError(f"Chromium must end with 0, but did with {result.returncode}: {result.stderr}")
    uncaught = _UNCAUGHT.findall(result.stderr)
    if uncaught:
        raise PageError(f"a page's scripts must run through, but of {page.name}: {uncaught}")
    return result.stdout
