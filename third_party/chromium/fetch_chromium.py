"""Fetches Debian's headless Chromium, its shared libraries and a font into one folder.

Called by the repository rule of chromium.bzl: `fetch_chromium.py FOLDER` makes FOLDER/chromium,
FOLDER/lib and FOLDER/fonts. apt verifies the packages against Debian's keyring, and their versions are
checked. PYTHONPATH has the folder of debian.py.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import debian

# The oldest supported host: its programs run on every later one.
SUITE = "bookworm"
# The accepted versions. The main archive of this suite is of July 2026, and its security archive is not read.
PACKAGES = {"chromium-headless-shell": "150.0.7871.100", "fonts-dejavu-core": "2.37"}
# libc6 is the host's. The others only serve configuring a system and windows on a screen; Mesa and
# LLVM would come with them, 200 MB.
NOT_NEEDED = ("debconf", "libc6", "x11-utils", "xdg-utils")
# Debugging aids of Vulkan, 23 MB.
DELETED = ("libVkICD_mock_icd.so*", "libVkLayer_khronos_validation.so*")


def arrange(root: pathlib.Path, folder: pathlib.Path) -> None:
    """Moves what runs from the unpacked packages under `root` to `folder`."""
    shutil.move(root / "usr/lib/chromium", folder / "chromium")
    for pattern in DELETED:
        for path in (folder / "chromium").glob(pattern):
            path.unlink()
    shutil.move(root / "usr/share/fonts/truetype/dejavu", folder / "fonts")
    # One folder of libraries: each subfolder would need an entry in LD_LIBRARY_PATH.
    (folder / "lib").mkdir()
    for path in [*root.glob("lib/**/lib*.so*"), *root.glob("usr/lib/**/lib*.so*")]:
        if path.is_symlink():  # to a file that ends up beside it
            name = os.path.basename(os.readlink(path))
            path.unlink()
            if name != path.name:
                (folder / "lib" / path.name).symlink_to(name)
        else:
            shutil.move(path, folder / "lib" / path.name)


def check(folder: pathlib.Path) -> None:
    """Starts the browser once: a library that is missing shows here, not in a test."""
    result = subprocess.run(
        [folder / "chromium/chromium-headless-shell", "--version"],
        env={"LD_LIBRARY_PATH": str(folder / "lib")},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        sys.exit(
            f"Debian {SUITE}'s chromium-headless-shell must run here, but says: "
            f"{result.stderr.strip()}\nUse Debian 12 or later; for a library that is missing, take "
            "its package out of NOT_NEEDED in fetch_chromium.py."
        )


def main(argv: list[str]) -> None:
    folder = pathlib.Path(argv[1]).absolute()
    folder.mkdir(parents=True)
    # Beside the result: /tmp may be small, or another file system.
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        scratch = pathlib.Path(name)
        try:
            debs = debian.download(PACKAGES, SUITE, scratch / "apt", taken_as_installed=NOT_NEEDED)
        except debian.DebianUnavailable as error:
            sys.exit(
                f"headless Chromium comes from Debian {SUITE} through apt, but {error}; build on Debian 12 or later, "
                "accept another version in PACKAGES of fetch_chromium.py if the tests in a browser pass with it, or "
                "leave those tests out"
            )
        debian.unpack(debs, scratch / "root")
        arrange(scratch / "root", folder)
    check(folder)


if __name__ == "__main__":
    main(sys.argv)
