"""Calls need no Triton, run no compiler and write no file; shown in fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import fitting_kernels
import pytest

CODE = textwrap.dedent("""
    import json, os, pathlib, sys
    sys.modules["triton"] = None  # import triton now raises ImportError
    import torch
    from tools.gpu_check.first_call import OutsideWatch

    torch.cuda.init()
    m, n, k = 48, 512, 1024
    a8 = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
    b8 = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn).t()
    scale_a, scale_b = torch.ones(m, 1, device="cuda"), torch.ones(1, n, device="cuda")
    # The same conversions and products by torch, before the watch: torch loads its own kernels.
    expected8 = a8.float() @ b8.float()
    a, b = a8.bfloat16(), b8.bfloat16()
    torch.cuda.synchronize()

    def files():
        folders = [os.environ["HOME"], os.environ["TMPDIR"], os.environ["CUDA_CACHE_PATH"], "."]
        return sorted(str(p) for f in folders for p in pathlib.Path(f).rglob("*") if p.is_file())

    before, watch = files(), OutsideWatch()
    import stoneware
    from stoneware.kernels.config import Config
    results = []
    for op, backend, kernel in json.loads(sys.argv[1]):
        config = Config(backend=backend, kernel=kernel)
        if op == "scaled_mm":
            results.append(stoneware.scaled_mm(a8, b8, scale_a, scale_b, config=config))
        else:
            results.append(stoneware.matmul(a, b, config=config))
    torch.cuda.synchronize()
    watch.is_on = False
    errors = [((r.float() - expected8).norm() / expected8.norm()).item() for r in results]
    print(json.dumps({
        "errors": errors,
        "outside": watch.seen,
        "new_files": sorted(set(files()) - set(before)),
        "triton": sorted(name for name, module in sys.modules.items()
                         if name.split(".")[0] == "triton" and module is not None),
    }))
""")


def test_kernels_run_without_triton_compiler_or_files(tmp_path):
    folders = {name: tmp_path / name for name in ("HOME", "TMPDIR", "CUDA_CACHE_PATH", "cwd")}
    for folder in folders.values():
        folder.mkdir()
    cwd = folders.pop("cwd")
    kernels = [
        (kernel.op, kernel.backend, kernel.id)
        for kernel in (*fitting_kernels.of_row_scales("bf16"), *fitting_kernels.of("matmul"))
        if kernel.config["out"] == "bf16" and kernel.config.get("layout", "nt") == "nt"
    ]
    if not kernels:
        pytest.skip("the wheel has no kernel for this GPU")
    environment = {
        **os.environ,
        **{name: str(folder) for name, folder in folders.items()},
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(kernels)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["outside"] == []
    assert result["new_files"] == []
    assert result["triton"] == []
    assert len(result["errors"]) == len(kernels) and max(result["errors"]) < 5e-3, result


def test_importing_starts_no_cuda():
    code = (
        "import stoneware, sys; stoneware.__version__; assert 'torch' not in sys.modules;"
        "stoneware.scaled_mm; import torch; assert not torch.cuda.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-rs"]))
