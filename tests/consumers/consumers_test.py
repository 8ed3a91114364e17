"""Two workspaces that have Stoneware vendored build a wheel of kernels of their own, offline.

One by WORKSPACE, one by MODULE.bazel. They run the Bazel that runs this test, without what Stoneware's
.bazelrc sets, and with the repositories that it fetched.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT / "tools/bootstrap"))

import bazelw  # noqa: E402

# Written by each workspace: one has the names of its own repositories, the other a toolchain for each.
_NOT_SHARED = ("stoneware_python", "stoneware_toolchains")


@pytest.fixture(scope="module")
def output_base() -> pathlib.Path:
    runfiles = pathlib.Path(os.environ["TEST_SRCDIR"]).resolve()
    folder = next(parent.parent for parent in runfiles.parents if parent.name == "execroot")
    if not (folder.parents[1] / "bazelw.bazelrc").exists():
        pytest.skip("needs a Bazel that ./bazelw started, to start the same one")
    return folder


def run_bazel(
    workspace: pathlib.Path, output_base: pathlib.Path, folder: pathlib.Path, canonical: str, *command_line: str
) -> subprocess.CompletedProcess[str]:
    """Runs Bazel in a workspace; `canonical` is what its repositories of Stoneware are called."""
    cache = output_base.parents[1]
    command, rc_lines = bazelw.find_bazel(cache)
    rc = folder / "bazelrc"
    rc.write_text("\n".join([f"common --disk_cache={cache / 'disk_cache'}", *rc_lines]) + "\n")
    shared = {path.name.rsplit("~", 1)[-1]: path for path in (output_base / "external").glob("*stoneware_*")}
    options = [
        "--lockfile_mode=off",
        # Whatever would be fetched after all fails.
        "--repository_disable_download",
        "--repo_env=PIP_NO_INDEX=1",
        *([f"--registry=file://{folder}/none"] if rc_lines else []),
        *(
            f"--override_repository={canonical.format(name)}={path}"
            for name, path in sorted(shared.items())
            if path.is_dir() and name not in _NOT_SHARED
        ),
    ]
    startup = [f"--output_user_root={cache / 'bazel'}", f"--bazelrc={rc}", "--max_idle_secs=10"]
    verb, *arguments = command_line
    return subprocess.run(
        [*command, *startup, verb, *options, *arguments],
        cwd=workspace,
        env={
            "HOME": str(folder),
            "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
            "USER": f"uid{os.getuid()}",
        },
        capture_output=True,
        text=True,
        check=False,
    )


def build(workspace: str, output_base: pathlib.Path, folder: pathlib.Path, canonical: str) -> pathlib.Path:
    """The wheel //kernels:wheel of a workspace."""
    path = _ROOT / "tests/consumers" / workspace
    options = [f"--symlink_prefix={folder}/bazel-", "//kernels:wheel"]
    result = run_bazel(path, output_base, folder, canonical, "build", *options)
    assert result.returncode == 0, result.stderr
    (wheel,) = (folder / "bazel-bin/kernels").glob("granite-1.0-*.whl")
    return wheel


_MODULE_NAMES = "stoneware~~stoneware~{}"


@pytest.mark.parametrize(("workspace", "canonical"), [("with_workspace", "{}"), ("with_module", _MODULE_NAMES)])
def test_a_workspace_of_somebody_else_builds_kernels_and_a_table_of_its_own(
    workspace, canonical, output_base, tmp_path
):
    site = tmp_path / "site"
    with zipfile.ZipFile(build(workspace, output_base, tmp_path, canonical)) as wheel:
        wheel.extractall(site)
    assert (site / "kernels/cubins/scale_triton_sm90_1024.cubin").read_bytes()[:4] == b"\x7fELF"
    assert (site / "kernels/tile_matmuls/bf16_bf16_row_row_64x64x64_128_sm_90a_forward.fatbin").stat().st_size > 0
    assert (site / "kernels/tables/acme.axpb.axpb.table").stat().st_size > 0
    manifest = json.loads((site / "kernels/kernel_manifest.json").read_text())
    kernels = {kernel["id"]: kernel for kernel in manifest["kernels"]}
    assert set(kernels) == {"half_mm_sm80_64x64", "scale_triton_sm90_1024"}
    assert kernels["half_mm_sm80_64x64"]["config"] == {"kStages": 3, "kTileM": 64, "kTileN": 64}
    program = "from kernels._kernels import kernels; print(kernels())"
    result = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(site)}, capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "['half_mm_sm80_64x64']", result.stderr


def test_bazelignore_keeps_a_module_vendored_in_the_tree_out_of_patterns(output_base, tmp_path):
    source = _ROOT / "tests/consumers/with_module"
    workspace = tmp_path / "workspace"
    (workspace / "third_party").mkdir(parents=True)
    (workspace / "third_party/stoneware").symlink_to(_ROOT)
    (workspace / "kernels").symlink_to(source / "kernels")
    for name in (".bazelignore", ".bazelrc"):
        (workspace / name).write_text((source / name).read_text())
    module = (source / "MODULE.bazel").read_text()
    assert 'path = "../../.."' in module
    (workspace / "MODULE.bazel").write_text(module.replace("../../..", "third_party/stoneware"))
    query = (workspace, output_base, tmp_path, _MODULE_NAMES, "query", "//...")
    result = run_bazel(*query)
    assert result.returncode == 0, result.stderr
    assert "//kernels:wheel" in result.stdout.splitlines()
    assert "//third_party" not in result.stdout
    (workspace / ".bazelignore").unlink()
    assert run_bazel(*query).returncode != 0, "the line of .bazelignore has no effect"
