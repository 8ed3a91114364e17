"""Debian packages of another suite, downloaded and unpacked without touching the system.

`apt-get` does the work, with state folders of its own, so the machine's mirror, proxy, certificates
and archive keyring apply and no root is needed. Used by bazelw (Bazel itself), by //third_party/python
(CPython headers) and by //third_party/chromium. A suite moves on, so each package has a version that is accepted.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

KEYRING = pathlib.Path("/usr/share/keyrings/debian-archive-keyring.gpg")

_INSTALLED_STANZA = """\
Package: {name}
Status: install ok installed
Priority: optional
Section: misc
Installed-Size: 1
Maintainer: nobody
Architecture: {architecture}
Multi-Arch: foreign
Version: 9999
Description: taken as present

"""


class DebianUnavailable(Exception):
    """Debian packages cannot be downloaded here, or are not those that are needed; the message says why."""


def mirror() -> str:
    """The machine's own Debian mirror, from apt's configuration.

    Raises:
      DebianUnavailable: no apt-get, dpkg-deb, keyring, or Debian source.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise DebianUnavailable(f"{tool} is not on PATH")
    if not KEYRING.exists():
        raise DebianUnavailable(f"Debian's archive keyring {KEYRING} is missing")
    listing = subprocess.run(
        # Release info is absent before the first `apt-get update`.
        ["apt-get", "indextargets", "--no-release-info", "--format", "$(REPO_URI) $(COMPONENT) $(RELEASE)"],
        capture_output=True,
        text=True,
        check=False,
    )
    for line in listing.stdout.splitlines():
        uri, component, release = [*line.split(), "", "", ""][:3]
        if component == "main" and not release.endswith(("-security", "-updates")):
            return uri
    raise DebianUnavailable(f"apt knows no Debian mirror ({listing.stderr.strip() or 'no deb line'})")


def download(
    packages: dict[str, str],
    suite: str,
    folder: pathlib.Path,
    taken_as_installed: tuple[str, ...] = (),
    with_dependencies: bool = True,
    architecture: str = "amd64",
) -> list[pathlib.Path]:
    """Downloads `packages` of `suite` into `folder`; returns the .deb files, sorted.

    Args:
      packages: names of Debian packages, each with its accepted upstream version, for example "7.7.1", in any
        revision of Debian's; or with how it begins, for example "25.*".
      suite: Debian suite, for example "trixie".
      folder: working folder; apt's state and the files go below it.
      taken_as_installed: dependencies that are left out together with theirs.
      with_dependencies: False downloads the named packages alone.
      architecture: Debian's name of the processor.

    Raises:
      DebianUnavailable: no usable apt, apt failed (its own words are in the message), or another version.
    """
    uri = mirror()
    for part in ("lists/partial", "cache/archives/partial", "debs"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "sources.list").write_text(f"deb [signed-by={KEYRING}] {uri} {suite} main\n")
    (folder / "status").write_text(
        "".join(_INSTALLED_STANZA.format(name=name, architecture=architecture) for name in taken_as_installed)
    )
    options = [
        "-qq",
        f"-oDir::Etc::SourceList={folder / 'sources.list'}",
        "-oDir::Etc::SourceParts=/dev/null",
        f"-oDir::State::Lists={folder / 'lists'}",
        f"-oDir::State::status={folder / 'status'}",
        f"-oDir::Cache={folder / 'cache'}",
        f"-oAPT::Architecture={architecture}",
        "-oAPT::Install-Recommends=0",
        "-oAPT::Sandbox::User=" + ("root" if os.geteuid() == 0 else ""),
        "-oAcquire::Languages=none",
        "-oDebug::NoLocking=1",
    ]
    _apt(["apt-get", *options, "update"], folder)
    chosen = []
    for name, version in packages.items():
        pattern = re.escape(version.removesuffix("*")) + ("" if version.endswith("*") else r"(?![\d.])")
        # Lines of "name | version | source", the newest first.
        lines = _apt(["apt-cache", *options, "madison", name], folder).splitlines()
        versions = [line.split("|")[1].strip() for line in lines]
        accepted = [carried for carried in versions if re.match(pattern, carried)]
        if not accepted:
            raise DebianUnavailable(
                f"Debian {suite} must have {name} {version}, but has {', '.join(versions) or 'none'}: it has moved on"
            )
        chosen.append(f"{name}={accepted[0]}")
    if with_dependencies:
        _apt(["apt-get", *options, "-y", "--download-only", "install", *chosen], folder)
        found = folder / "cache/archives"
    else:
        _apt(["apt-get", *options, "download", *chosen], folder / "debs")
        found = folder / "debs"
    return sorted(found.glob("*.deb"))


def _apt(command: list[str], cwd: pathlib.Path) -> str:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if result.returncode:
        verb = next(word for word in command[1:] if not word.startswith("-"))
        raise DebianUnavailable(f"`{command[0]} {verb}` failed: {(result.stderr or result.stdout).strip()}")
    return result.stdout


def unpack(debs: list[pathlib.Path], root: pathlib.Path) -> None:
    """Unpacks the .deb files under `root` and makes their absolute symlinks relative."""
    root.mkdir(parents=True, exist_ok=True)
    for deb in debs:
        subprocess.run(["dpkg-deb", "-x", str(deb), str(root)], check=True)
    for folder, subfolders, files in os.walk(root):
        for name in subfolders + files:
            path = pathlib.Path(folder, name)
            if path.is_symlink() and os.readlink(path).startswith("/"):
                target = root / os.readlink(path).lstrip("/")
                path.unlink()
                path.symlink_to(os.path.relpath(target, path.parent))


def sha256_of(folder: pathlib.Path) -> str:
    """The sha256 of the names and contents of all files below `folder`."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def main(argv: list[str]) -> int:
    """`debian.py SUITE PACKAGE VERSION SHA256 FOLDER ARCHITECTURE`: unpacks the headers of one package.

    They are in FOLDER/unpacked/usr/include. A new revision of the package, with the same headers, has the same SHA256.
    """
    if len(argv) != 7:
        print("usage: debian.py SUITE PACKAGE VERSION SHA256 FOLDER ARCHITECTURE", file=sys.stderr)
        return 2
    suite, package, version, expected = argv[1:5]
    folder = pathlib.Path(argv[5]).absolute()
    try:
        debs = download({package: version}, suite, folder / "apt", with_dependencies=False, architecture=argv[6])
    except DebianUnavailable as error:
        print(f"cannot get Debian's {package} ({suite}): {error}", file=sys.stderr)
        return 1
    unpack(debs, folder / "unpacked")
    shutil.rmtree(folder / "apt")
    found = sha256_of(folder / "unpacked/usr/include")
    if found != expected:
        print(f"headers of {package} ({suite}) must have sha256 {expected}, but have {found}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
