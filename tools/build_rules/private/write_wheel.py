"""Writes a wheel, or the folder that it would unpack to; the program of the rule python_wheel.

The folder has no RECORD. In the wheel entries are sorted and carry fixed times and modes; the package
`wheel` writes the archive and RECORD, and auditwheel tells whether its modules keep what a manylinux tag
promises.
"""

import email.message
import email.policy
import json
import logging
import os
import pathlib
import re
import struct
import sys
import zipfile

from absl import app, flags
from auditwheel.error import NonPlatformWheelError
from auditwheel.wheel_abi import WheelAbIInfo, analyze_wheel_abi
from auditwheel.wheeltools import get_wheel_architecture, get_wheel_libc
from wheel import wheelfile

_CONTENTS = flags.DEFINE_string("contents", None, "JSON: path in the wheel to file.", required=True)
_DISTRIBUTION = flags.DEFINE_string("distribution", None, "Name on the package index.", required=True)
_VERSION = flags.DEFINE_string("version", None, "Version of the distribution.", required=True)
_SUMMARY = flags.DEFINE_string("summary", None, "One line on what it is.", required=True)
_TAG = flags.DEFINE_string("tag", None, "Python, ABI and platform tag.", required=True)
_REQUIRES_PYTHON = flags.DEFINE_string("requires_python", None, "Python versions.", required=True)
_REQUIRES = flags.DEFINE_multi_string("requires", [], "Requirements, as pip spells them.")
_EXTRA = flags.DEFINE_multi_string("extra", [], "EXTRA=REQUIREMENT, of what is optional.")
_ENTRY_POINT = flags.DEFINE_multi_string(
    "entry_point", [], "GROUP=NAME = MODULE:FUNCTION, for example of a console script."
)
_LICENSE_EXPRESSION = flags.DEFINE_string("license_expression", None, "SPDX expression.", required=True)
_LICENSE_FILE = flags.DEFINE_multi_string("license_file", [], "Path in .dist-info/licenses, among the contents.")
_README = flags.DEFINE_string("readme", None, "The long description, Markdown.", required=True)
_WHEEL = flags.DEFINE_string("wheel", None, "The wheel to write.")
_SITE = flags.DEFINE_string("site", None, "The folder to fill.")

# The earliest time that the zip format can say, and the same in seconds since 1970.
_TIME = (1980, 1, 1, 0, 0, 0)
_EPOCH = "315532800"
_REGULAR_FILE_0644 = 0o100644 << 16

# A normalised name, which core metadata 2.4 asks for in Provides-Extra.
_EXTRA_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
# The entry points specification of the Python packaging guide; names as its "new" ones.
_GROUP = re.compile(r"\w+(\.\w+)*")
_ENTRY = re.compile(r"\s*([\w.-]+)\s*=\s*(\w+(?:\.\w+)*(:\w+(?:\.\w+)*)?)\s*")
# elf.h: e_machine, little-endian, and its values by the end of a platform tag.
_ELF_MACHINE_OFFSET = 18
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
_MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_\w+")  # PEP 600
# Of these installers make programs, which call a function.
_SCRIPT_GROUPS = ("console_scripts", "gui_scripts")


class WheelError(Exception):
    """The flags make no valid wheel; the message has rule, value and remedy."""


def extra_requirements(extras: list[str]) -> dict[str, list[str]]:
    """Extra to its requirements, each with the marker of the extra; extras are sorted.

    Args:
      extras: "EXTRA=REQUIREMENT"; a marker of the requirement's own is kept.

    Raises:
      WheelError: an extra has no requirement, or a name that is not normalised.
    """
    requirements: dict[str, list[str]] = {}
    for pair in sorted(extras):
        extra, _, requirement = pair.partition("=")
        package, _, marker = map(str.strip, requirement.partition(";"))
        if not _EXTRA_NAME.fullmatch(extra) or not package:
            raise WheelError(
                "an extra must be NAME=REQUIREMENT, with lower-case letters, digits and single "
                f"dashes in NAME, but is {pair!r}; correct `extras` of the python_wheel"
            )
        also = f"({marker}) and " if marker else ""
        requirements.setdefault(extra, []).append(f'{package}; {also}extra == "{extra}"')
    return requirements


def entry_points(entries: list[str]) -> bytes:
    """entry_points.txt: groups sorted, and the names of a group.

    Args:
      entries: "GROUP=NAME = MODULE:FUNCTION"; the function only has to be there in a group of
        scripts.

    Raises:
      WheelError: an entry reads otherwise, or a group has a name twice.
    """
    groups: dict[str, dict[str, str]] = {}
    for pair in entries:
        group, _, entry = pair.partition("=")
        match = _ENTRY.fullmatch(entry)
        is_whole = match and (match[3] or group not in _SCRIPT_GROUPS)
        if not _GROUP.fullmatch(group) or not is_whole:
            raise WheelError(
                f"an entry point must be GROUP=NAME = MODULE:FUNCTION, but is {pair!r}; correct "
                "`entry_points` of the python_wheel"
            )
        name, target, _ = match.groups()
        if name in groups.setdefault(group, {}):
            raise WheelError(
                f"an entry point's name must stand once in its group, but {name!r} of {group} is "
                f"{groups[group][name]} and {target}; rename one"
            )
        groups[group][name] = target
    sections = [
        "\n".join([f"[{group}]", *(f"{name} = {names[name]}" for name in sorted(names)), ""])
        for group, names in sorted(groups.items())
    ]
    return "\n".join(sections).encode()


def metadata() -> bytes:
    """METADATA, core metadata 2.4."""
    # No line is folded: readers show a header as it stands.
    message = email.message.Message(policy=email.policy.compat32.clone(max_line_length=0))
    message["Metadata-Version"] = "2.4"
    message["Name"] = _DISTRIBUTION.value
    message["Version"] = _VERSION.value
    message["Summary"] = _SUMMARY.value
    message["License-Expression"] = _LICENSE_EXPRESSION.value
    for path in _LICENSE_FILE.value:
        message["License-File"] = path
    message["Requires-Python"] = _REQUIRES_PYTHON.value
    for requirement in _REQUIRES.value:
        message["Requires-Dist"] = requirement
    for extra, requirements in extra_requirements(_EXTRA.value).items():
        message["Provides-Extra"] = extra
        for requirement in requirements:
            message["Requires-Dist"] = requirement
    message["Description-Content-Type"] = "text/markdown"
    return message.as_bytes() + pathlib.Path(_README.value).read_bytes()


def wheel_metadata() -> bytes:
    """WHEEL, as the binary distribution format asks."""
    return (
        f"Wheel-Version: 1.0\nGenerator: stoneware python_wheel\nRoot-Is-Purelib: false\nTag: {_TAG.value}\n"
    ).encode()


def check_processor(contents: dict[str, bytes], tag: str) -> None:
    """Checks that the modules are for the processor of the platform tag; auditwheel leaves out those that are not.

    Raises:
      WheelError: one is for another processor.
    """
    processor = next((name for name in _ELF_MACHINES if tag.endswith(f"_{name}")), None)
    for path, data in contents.items():
        if processor is None or not path.endswith(".so"):
            continue
        (machine,) = struct.unpack_from("<H", data, _ELF_MACHINE_OFFSET)
        if machine != _ELF_MACHINES[processor]:
            names = {number: name for name, number in _ELF_MACHINES.items()}
            raise WheelError(
                f"modules must be for the processor of the tag {tag}, but {path} is for "
                f"{names.get(machine, f'ELF machine {machine}')}; set `platform` of the python_wheel to the tag of "
                "that processor, or build without --platforms"
            )


def check_platform(wheel: pathlib.Path, tag: str) -> None:
    """Checks the symbol versions and libraries of the wheel's modules against its platform tag.

    Raises:
      WheelError: the tag promises more than the modules keep.
    """
    platform = tag.split("-")[2]
    claimed = _MANYLINUX.fullmatch(platform)
    if claimed is None:
        return
    try:
        info = analyze_wheel_abi(
            get_wheel_libc(wheel.name),
            get_wheel_architecture(wheel.name),
            wheel,
            frozenset(),
            disable_isa_ext_check=False,
            allow_graft=False,
        )
    except NonPlatformWheelError:  # it has no extension module
        return
    found = info.overall_policy.name
    proven = _MANYLINUX.fullmatch(found)
    if proven is None or tuple(map(int, proven.groups())) > tuple(map(int, claimed.groups())):
        raise WheelError(
            f"the modules must run wherever {platform} says, but they are {found}: they need "
            f"{_needs(info)}; build with Stoneware's C++ toolchain (stoneware_toolchains() in WORKSPACE, "
            'register_toolchains("@stoneware_toolchains//:all") in MODULE.bazel, without cc = False), or set '
            'platform = "linux_x86_64" in the python_wheel'
        )


def _needs(info: WheelAbIInfo) -> str:
    """The libraries that no policy has, then the symbol versions, library by library."""
    libraries = info.external_refs[info.overall_policy.name].libs
    versions = (
        f"{library} ({', '.join(sorted(symbols))})" for library, symbols in sorted(info.versioned_symbols.items())
    )
    return ", ".join([*sorted(libraries), *versions])


def write_site(contents: dict[str, bytes], folder: pathlib.Path) -> None:
    for path, data in contents.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def write_wheel(contents: dict[str, bytes], file: str) -> None:
    os.environ["SOURCE_DATE_EPOCH"] = _EPOCH  # For RECORD, which the package writes by itself.
    logging.getLogger("wheel").setLevel(logging.WARNING)  # It would name every file,
    logging.getLogger("auditwheel").setLevel(logging.ERROR)  # and this one every cubin.
    with wheelfile.WheelFile(file, "w", compression=zipfile.ZIP_DEFLATED) as archive:
        for path, data in sorted(contents.items()):
            entry = zipfile.ZipInfo(path, date_time=_TIME)
            entry.external_attr = _REGULAR_FILE_0644
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    check_platform(pathlib.Path(file), _TAG.value)


def main(argv: list[str]) -> None:
    del argv
    listing = json.loads(pathlib.Path(_CONTENTS.value).read_text(encoding="utf-8"))
    contents = {path: pathlib.Path(file).read_bytes() for path, file in listing.items()}
    info = f"{_DISTRIBUTION.value}-{_VERSION.value}.dist-info"
    contents[f"{info}/WHEEL"] = wheel_metadata()
    try:
        check_processor(contents, _TAG.value)
        contents[f"{info}/METADATA"] = metadata()
        if _ENTRY_POINT.value:
            contents[f"{info}/entry_points.txt"] = entry_points(_ENTRY_POINT.value)
        if _SITE.value:
            write_site(contents, pathlib.Path(_SITE.value))
        if _WHEEL.value:
            write_wheel(contents, _WHEEL.value)
    except WheelError as error:
        sys.exit(f"write_wheel: {error}")


if __name__ == "__main__":
    app.run(main)
