"""No file of the repository names a package registry's address or a folder of a machine; every test file is run."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]

# Written so that this file does not match itself.
_REGISTRY = re.compile(
    r"(?:pypi|pythonhosted|anaconda)[.]org|pypi[.]nvidia[.]com|download[.]pytorch[.]org"
    r"|(?:deb|ftp|snapshot|security)[.]debian[.]org|archive[.]ubuntu[.]com|bcr[.]bazel[.]build"
    r"|mirror[.]bazel[.]build|developer[.]download[.]nvidia[.]com|/releases/download[/]"
    r"|--(?:extra-)?index-url\b|--find-link[s]\b"
)
# //third_party/python unpacks a Debian package to a folder of that name, with usr below it.
_MACHINE_FOLDER = re.compile(
    r"""(?:^|[\s"'`=:(<])"""
    r"""(?:/(?:home|Users)/\w|/roo[t]/(?!usr/)\w|/wor[k]/\w|/op[t]/whee[l]|/tmp/bas[h])""",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """Path to text of what git tracks and of what it would add."""
    assert (_ROOT / "WORKSPACE").exists(), f"{_ROOT} is no checkout"
    if shutil.which("git") is None or not (_ROOT / ".git").exists():
        pytest.skip("needs git and a clone, to tell sources from other files")
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={_ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=_ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = [path for path in listed.split("\0") if path and (_ROOT / path).is_file()]
    assert "tests/build_rules/repository_text_test.py" in paths
    return {path: (_ROOT / path).read_text(encoding="utf-8", errors="replace") for path in paths}


def found_in(sources: dict[str, str], pattern: re.Pattern[str]) -> dict[str, set[str]]:
    found = {path: set(pattern.findall(text)) for path, text in sources.items()}
    return {path: matches for path, matches in found.items() if matches}


def test_no_source_has_the_address_of_a_package_registry(sources):
    assert found_in(sources, _REGISTRY) == {}


def test_no_source_has_a_folder_of_a_machine(sources):
    assert found_in(sources, _MACHINE_FOLDER) == {}


def test_every_file_of_tests_is_in_a_target(sources):
    tests = [pathlib.PurePosixPath(path) for path in sources if re.fullmatch(r"tests/.*_test[.]py", path)]
    assert len(tests) > 100
    targets = {folder: sources[f"{folder}/BUILD.bazel"] for folder in {path.parent for path in tests}}
    assert [str(path) for path in tests if not re.search(f'"{path.stem}([.]py)?"', targets[path.parent])] == []


@pytest.mark.parametrize(
    "parts",
    [
        ("https://py", "pi.org/simple"),
        ("https://files.python", "hosted.org/x"),
        ("https://download.py", "torch.org/whl/cpu"),
        ("http://deb.de", "bian.org/x"),
        ("pip install --index", "-url x"),
    ],
)
def test_the_pattern_knows_registries(parts):
    assert _REGISTRY.search("".join(parts))


@pytest.mark.parametrize("parts", [("cd /home", "/alice/x"), ('"/roo', 't/x"'), ("--out=/wor", "k/x")])
def test_the_pattern_knows_machine_folders(parts):
    assert _MACHINE_FOLDER.search("".join(parts))
