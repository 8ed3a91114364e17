"""Writes a wheel and its unpacked copy; the program of the rule python_wheel.

Entries are sorted and carry fixed times and modes; the package `wheel` writes the archive and RECORD.
"""

import email.message
import email.policy
import json
import logging
import os
import pathlib
import zipfile

from absl import app, flags
from wheel import wheelfile

_CONTENTS = flags.DEFINE_string("contents", None, "JSON: path in the wheel to file.", required=True)
_DISTRIBUTION = flags.DEFINE_string("distribution", None, "Name on the package index.", required=True)
_VERSION = flags.DEFINE_string("version", None, "Version of the distribution.", required=True)
_SUMMARY = flags.DEFINE_string("summary", None, "One line on what it is.", required=True)
_TAG = flags.DEFINE_string("tag", None, "Python, ABI and platform tag.", required=True)
_REQUIRES_PYTHON = flags.DEFINE_string("requires_python", None, "Python versions.", required=True)
_REQUIRES = flags.DEFINE_multi_string("requires", [], "Requirements, as pip spells them.")
_LICENSE = flags.DEFINE_string("license", None, "The licence's text.", required=True)
_README = flags.DEFINE_string("readme", None, "The long description, Markdown.", required=True)
_WHEEL = flags.DEFINE_string("wheel", None, "The wheel to write.", required=True)
_SITE = flags.DEFINE_string("site", None, "The folder for the unpacked copy.", required=True)

# The earliest time that the zip format can say, and the same in seconds since 1970.
_TIME = (1980, 1, 1, 0, 0, 0)
_EPOCH = "315532800"
_REGULAR_FILE_0644 = 0o100644 << 16


def metadata() -> bytes:
    """METADATA, core metadata 2.4."""
    # No line is folded: readers show a header as it stands.
    message = email.message.Message(policy=email.policy.compat32.clone(max_line_length=0))
    message["Metadata-Version"] = "2.4"
    message["Name"] = _DISTRIBUTION.value
    message["Version"] = _VERSION.value
    message["Summary"] = _SUMMARY.value
    message["License-Expression"] = "Apache-2.0"
    message["License-File"] = "LICENSE"
    message["Requires-Python"] = _REQUIRES_PYTHON.value
    for requirement in _REQUIRES.value:
        message["Requires-Dist"] = requirement
    message["Description-Content-Type"] = "text/markdown"
    return message.as_bytes() + pathlib.Path(_README.value).read_bytes()


def wheel_metadata() -> bytes:
    """WHEEL, as the binary distribution format asks."""
    return (
        "Wheel-Version: 1.0\nGenerator: stoneware python_wheel\nRoot-Is-Purelib: false\n"
        f"Tag: {_TAG.value}\n"
    ).encode()


def main(argv: list[str]) -> None:
    del argv
    os.environ["SOURCE_DATE_EPOCH"] = _EPOCH  # For RECORD, which the package writes by itself.
    logging.getLogger("wheel").setLevel(logging.WARNING)  # It would name every file.
    listing = json.loads(pathlib.Path(_CONTENTS.value).read_text(encoding="utf-8"))
    contents = {path: pathlib.Path(file).read_bytes() for path, file in listing.items()}
    info = f"{_DISTRIBUTION.value}-{_VERSION.value}.dist-info"
    contents[f"{info}/METADATA"] = metadata()
    contents[f"{info}/WHEEL"] = wheel_metadata()
    contents[f"{info}/licenses/LICENSE"] = pathlib.Path(_LICENSE.value).read_bytes()
    with wheelfile.WheelFile(_WHEEL.value, "w", compression=zipfile.ZIP_DEFLATED) as archive:
        for path, data in sorted(contents.items()):
            entry = zipfile.ZipInfo(path, date_time=_TIME)
            entry.external_attr = _REGULAR_FILE_0644
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    with zipfile.ZipFile(_WHEEL.value) as archive:
        archive.extractall(_SITE.value)


if __name__ == "__main__":
    app.run(main)
