"""Cubins with common epilogues that the build linked: a call with one of them links nothing.

    stoneware/linked_epilogues/<op>.zip    a file for each cubin, named by `link.digest`

The versions of NVRTC and nvJitLink are not part of these names, so neither library needs to be installed.
"""

from __future__ import annotations

import logging
import zipfile

from stoneware.runtime import package_files

FOLDER = "linked_epilogues"

_LOG = logging.getLogger("stoneware.epilogue")

_reported: set[str] = set()
"""Archives whose damage was logged."""


def read(op: str, name: str) -> bytes | None:
    """The cubin of a digest; None if the wheel lacks it, or if it is damaged, which is logged once."""
    path = package_files.path(FOLDER, f"{op}.zip")
    try:
        with zipfile.ZipFile(path) as archive:  # opened each time, since forked processes would share its position
            return archive.read(name)
    except (FileNotFoundError, KeyError):
        return None
    except Exception as error:  # what zipfile and its decoders raise for damaged data
        if str(path) not in _reported:
            _reported.add(str(path))
            _LOG.warning(
                "%s: must be an archive of linked epilogues, and is damaged: %s; until you %s, they are linked here",
                path,
                error,
                package_files.REMEDY,
            )
        return None
