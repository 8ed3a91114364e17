"""sw.autotune launches what Triton would, with Triton's arguments, whoever launches it.

On a fake GPU (fake_gpu.py): Triton compiles, nothing runs.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading

import decorated_kernels
import pytest
import torch
import triton
import triton.language as tl
from decorated_kernels import CONFIGS, gpu, scale  # noqa: F401  (a fixture)
from fake_gpu import STREAM, Tensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stoneware as sw
from stoneware.errors import UnsupportedError
from stoneware.triton_autotune.decorator import autotune

ONE = [triton.Config({"BLOCK": 16})]


def decorate(fn=scale, configs=ONE, key=("n",), **options):
    return autotune(configs=list(configs), key=list(key), **options)(fn)


def ours(gpu):
    """(grid, arguments) of the last launch, which must have been ours."""
    assert gpu.order[-1] == "ours"
    _, device, stream, grid, arguments = gpu.launches[-1]
    assert (device, stream) == (gpu.ordinal, STREAM)
    return grid, arguments


def test_the_first_launch_is_tritons_and_the_next_is_ours_with_equal_arguments(gpu):
    kernel, x, y = decorate(), Tensor(4096), Tensor(8192)
    for _ in range(3):
        kernel[(7,)](x, y, 33, 5)
    assert gpu.order == ["triton", "ours", "ours"]
    grid, arguments = gpu.triton_launches[0]
    assert (arguments["x_ptr"], arguments["n"], arguments["BLOCK"]) == (x, 33, 16)
    # x_ptr, y_ptr, n, stride, and Triton's two pointers to scratch memory.
    assert ours(gpu) == (grid, (4096, 8192, 33, 5, 0, 0))


def test_a_value_that_triton_specialises_on_gets_its_own_kernel(gpu):
    """The same kernel with n a multiple of 16 would load past the end."""
    kernel, x, y = decorate(key=()), Tensor(4096), Tensor(8192)
    launches = []
    for n, stride, address in (
        (32, 5, 8192),
        (33, 5, 8192),
        (48, 5, 8192),
        (33, 1, 8192),
        (33, 5, 8196),
        (2**40, 5, 8192),
    ):
        before = gpu.compiled
        kernel[(1,)](x, Tensor(address), n, stride)
        launches.append((gpu.order[-1], gpu.compiled - before))
    assert launches == [("triton", 1), ("triton", 1), ("ours", 0), ("triton", 1), ("triton", 1), ("triton", 1)]
    kernel[(1,)](x, y, 35, 1)  # stride is 1: compiled in, not passed
    assert ours(gpu)[1] == (4096, 8192, 35, 0, 0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from([1, 2, 16, 17, 32, 0, -16, 2**31 - 1, 2**31, 2**35]),
            st.sampled_from([1, 3, 16]),
            st.sampled_from([4096, 4100]),
        ),
        min_size=2,
        max_size=8,
    )
)
def test_whatever_was_launched_before_a_launch_has_tritons_kernel_and_arguments(gpu, calls):
    """Against JITFunction.run with the same arguments, for any sequence of calls."""
    kernel = decorate(key=(), cache_results=False)
    for n, stride, address in calls:
        x, y = Tensor(address), Tensor(8192)
        launched = kernel[(2,)](x, y, n, stride)
        compiled = scale[(2,)](x, y, n, stride, BLOCK=16)
        assert launched.hash == compiled.hash
        if gpu.order[-2] == "ours":
            passed = [
                value.data_ptr() if isinstance(value, Tensor) else value
                for name, value in (("x_ptr", x), ("y_ptr", y), ("n", n), ("stride", stride))
                if compiled.src.signature[name] != "constexpr"
            ]
            assert gpu.launches[-1][4] == (*passed, 0, 0)


@pytest.mark.parametrize("keywords", [(), ("n", "stride"), ("stride", "n"), ("y_ptr", "stride", "n")], ids=str)
def test_keywords_in_any_order_reach_their_parameters(gpu, keywords):
    kernel = decorate()
    values = {"x_ptr": Tensor(4096), "y_ptr": Tensor(8192), "n": 33, "stride": 5}
    args = [value for name, value in values.items() if name not in keywords]
    for _ in range(2):
        kernel[(1,)](*args, **{name: values[name] for name in keywords})
    assert ours(gpu)[1] == (4096, 8192, 33, 5, 0, 0)


def test_a_grid_sees_every_parameter_and_may_have_any_number_of_axes(gpu):
    kernel, seen = decorate(), []

    def grid(meta):
        seen.append(dict(meta))
        return (triton.cdiv(meta["n"], meta["BLOCK"]), 2)

    x, y = Tensor(), Tensor()
    for _ in range(3):
        kernel[grid](x, y, n=100, stride=5)
    assert seen[0] == seen[1] == seen[2] == {"x_ptr": x, "y_ptr": y, "n": 100, "stride": 5, "BLOCK": 16, "EVEN": False}
    assert ours(gpu)[0] == (7, 2, 1)
    kernel[[3, 2, 1]](x, y, 100, 5)
    assert ours(gpu)[0] == (3, 2, 1)


def test_an_empty_grid_launches_nothing(gpu):
    kernel = decorate()
    kernel[(1,)](Tensor(), Tensor(), 33, 5)
    before = list(gpu.order)
    kernel[(0,)](Tensor(), Tensor(), 33, 5)
    kernel[lambda meta: (4, 0)](Tensor(), Tensor(), 33, 5)
    assert gpu.order == before


def test_heuristics_below_and_above_give_their_values(gpu):
    even = triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
    below = decorate(even(scale), cache_results=False)
    above = triton.heuristics({"EVEN": lambda args: args["n"] % 16 == 0})(decorate(cache_results=False))
    for kernel in (below, above):
        gpu.order.clear(), gpu.triton_launches.clear()
        for n in (160, 161, 160, 161, 176):
            kernel[(1,)](Tensor(), Tensor(), n, 5)
        assert [item[1]["EVEN"] for item in gpu.triton_launches][:2] == [True, False]
        assert gpu.order[:4] == ["triton", "triton", "ours", "ours"]


def test_a_heuristic_is_asked_at_each_launch(gpu):
    """Its value may change while every argument's kind stays."""
    even = triton.heuristics({"EVEN": lambda args: args["n"] > 1000})
    kernel = decorate(even(scale), key=())
    for n in (17, 1017, 17, 1017):
        kernel[(1,)](Tensor(), Tensor(), n, 5)
    assert [item[1]["EVEN"] for item in gpu.triton_launches] == [False, True]
    assert gpu.order == ["triton", "triton", "ours", "ours"]


def test_hooks_of_a_config_run_at_each_launch_with_all_arguments(gpu):
    seen = []
    config = triton.Config({"BLOCK": 16}, pre_hook=lambda args: seen.append(dict(args)))
    kernel, x, y = decorate(configs=[config]), Tensor(), Tensor()
    for _ in range(3):
        kernel[(1,)](x, y, n=33, stride=5)
    assert len(seen) == 3
    assert all(item["n"] == 33 and item["BLOCK"] == 16 and item["x_ptr"] is x for item in seen)
    assert gpu.order == ["triton", "ours", "ours"]


@pytest.mark.parametrize("is_positional", [True, False])
def test_a_meta_parameter_given_twice_is_a_value_error(gpu, is_positional):
    kernel = decorate()
    with pytest.raises(ValueError, match="BLOCK must be given once.*BLOCK=16.*leave tuned"):
        if is_positional:
            kernel[(1,)](Tensor(), Tensor(), 33, 5, 16)
        else:
            kernel[(1,)](Tensor(), Tensor(), 33, 5, BLOCK=16)


def test_an_option_of_the_config_given_again_is_a_value_error(gpu):
    with pytest.raises(ValueError, match="num_warps must be given once"):
        decorate()[(1,)](Tensor(), Tensor(), 33, 5, num_warps=8)


def test_names_that_are_no_parameters_are_refused_at_the_decoration():
    for option in ("key", "reset_to_zero", "restore_value"):
        options = {"key": ["n"], option: ["nn"]}
        with pytest.raises(ValueError, match=f"{option} must name parameters.*'nn'.*x_ptr"):
            decorate(**options)


def test_options_of_a_call_are_compiled_for(gpu):
    kernel = decorate()
    for fusion in (True, False, True, False):
        kernel[(1,)](Tensor(), Tensor(), 33, 5, enable_fp_fusion=fusion)
    assert gpu.compiled == 2 and gpu.order == ["triton", "triton", "ours", "ours"]


def test_what_only_triton_can_launch_it_launches_each_time(gpu):
    kernel = decorate()
    for _ in range(2):
        kernel[(1,)](Tensor(), Tensor(), 33, 5, launch_pdl=True)

    class Wrapped(Tensor):
        pass

    for _ in range(2):
        kernel[(1,)](Wrapped(), Tensor(), 33, 5)
    assert gpu.order == ["triton"] * 4


def test_a_kernel_from_an_ir_file_is_not_kept(gpu, tmp_path):
    """No digest would see that the file changed."""
    scale[(1,)](Tensor(), Tensor(), 33, 5, BLOCK=16)
    scale.device_caches.clear()
    path = tmp_path / "kernel.ttir"
    compiled = scale.warmup(torch.float32, torch.float32, 33, 5, BLOCK=16, grid=(1,))
    path.write_text(compiled.asm["ttir"])
    config = triton.Config({"BLOCK": 16}, ir_override=str(path))
    for _ in range(2):
        decorate(configs=[config])[(1,)](Tensor(), Tensor(), 33, 5)
    assert gpu.order == ["triton"] * 3
    assert not (tmp_path / "tuning" / "kernels").exists()


def test_launch_hooks_and_debug_mode_go_through_triton_while_they_are_set(gpu, monkeypatch):
    kernel, seen = decorate(), []
    for _ in range(2):
        kernel[(1,)](Tensor(), Tensor(), 33, 5)
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(seen.append)
    try:
        kernel[(1,)](Tensor(), Tensor(), 33, 5)
    finally:
        hooks.remove(seen.append)
    kernel[(1,)](Tensor(), Tensor(), 33, 5)
    assert gpu.order == ["triton", "ours", "triton", "ours"]
    scale.add_pre_run_hook(lambda *args, **kwargs: seen.append("run"))
    try:
        kernel[(1,)](Tensor(), Tensor(), 33, 5)
    finally:
        scale.pre_run_hooks.clear()
    assert gpu.order[-1] == "triton" and seen == ["run"]


def test_a_global_that_changed_since_is_an_error(gpu, monkeypatch):
    kernel = decorate()
    for _ in range(2):
        kernel[(1,)](Tensor(), Tensor(), 33, 5)
    monkeypatch.setattr(decorated_kernels, "FACTOR", tl.constexpr(4))
    with pytest.raises(RuntimeError, match="FACTOR must stay.*constexpr"):
        kernel[(1,)](Tensor(), Tensor(), 33, 5)


def test_devices_have_kernels_of_their_own(gpu):
    kernel = decorate()
    for ordinal, capability in ((0, (9, 0)), (1, (8, 0)), (0, (9, 0)), (1, (8, 0))):
        gpu.ordinal, gpu.capability = ordinal, capability
        kernel[(1,)](Tensor(), Tensor(), 33, 5)
    assert gpu.compiled == 2 and gpu.order == ["triton", "triton", "ours", "ours"]
    assert [launch[1] for launch in gpu.launches] == [0, 1]


def test_a_kernel_that_was_kept_is_launched_without_tritons_compiler(gpu, monkeypatch):
    """A second decorator stands for a second process: nothing is left but the files."""
    decorate()[(1,)](Tensor(4096), Tensor(8192), 33, 5)

    def compiled_again(*_, **__):
        raise AssertionError("Triton was asked")

    monkeypatch.setattr(type(scale), "run", compiled_again)
    decorate()[(1,)](Tensor(4096), Tensor(8192), 33, 5)
    assert gpu.order == ["triton", "ours"]
    assert ours(gpu)[1] == (4096, 8192, 33, 5, 0, 0)


def test_damaged_kept_kernels_are_compiled_anew_and_reported(gpu, tmp_path, caplog):
    decorate()[(1,)](Tensor(), Tensor(), 33, 5)
    (file,) = (tmp_path / "tuning" / "kernels").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with caplog.at_level(logging.WARNING):
        decorate()[(1,)](Tensor(), Tensor(), 33, 5)
    assert gpu.order == ["triton", "triton"] and str(file) in caplog.text
    assert file.read_bytes() == whole


def test_a_kernel_from_a_folder_that_others_can_write_is_not_launched(gpu, tmp_path, caplog):
    """The digest in a file proves nothing: a writer of the file also writes the digest."""
    decorate()[(1,)](Tensor(), Tensor(), 33, 5)
    folder = tmp_path / "tuning" / "kernels"
    folder.chmod(0o777)
    kernel = decorate()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            kernel[(1,)](Tensor(), Tensor(), 33, 5)
    assert gpu.order == ["triton", "triton", "ours"]  # compiled in this process, and kept in it
    assert sum(str(folder) in record.message for record in caplog.records) == 1


def test_a_kept_kernel_is_of_the_same_toolkit_knobs_and_device(gpu, monkeypatch):
    def launched_by(setting) -> str:
        with pytest.MonkeyPatch.context() as patch:
            setting(patch)
            decorate()[(1,)](Tensor(), Tensor(), 33, 5)
        return gpu.order[-1]

    assert launched_by(lambda patch: None) == "triton"
    assert launched_by(lambda patch: None) == "ours"
    assert launched_by(lambda patch: patch.setattr(triton, "__version__", "3.5")) == "triton"
    # A tool that cannot be started, so that asking for its version would show.
    assert launched_by(lambda patch: patch.setenv("PTXAS_OPTIONS", "-O2")) == "triton"
    assert launched_by(lambda patch: patch.setattr(gpu, "capability", (8, 0))) == "triton"
    assert launched_by(lambda patch: None) == "ours"


def test_without_cache_results_nothing_is_written_or_read(gpu, tmp_path):
    for _ in range(2):
        decorate(cache_results=False)[(1,)](Tensor(), Tensor(), 33, 5)
    assert gpu.order == ["triton", "triton"]
    assert not (tmp_path / "tuning" / "kernels").exists()


def test_threads_launch_at_once(gpu):
    kernel, errors = decorate(key=()), []
    start = threading.Barrier(8)

    def work(n):
        try:
            start.wait()
            for step in range(50):
                kernel[(1,)](Tensor(4096), Tensor(8192), n + 16 * (step % 3), 5)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in (17, 32) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(gpu.order) == 400 and gpu.order.count("ours") > 300


def test_the_attributes_of_tritons_autotuner_are_there(gpu):
    kernel = decorate(configs=CONFIGS, key=["stride", "n"])
    assert kernel.fn is scale and kernel.base_fn is scale.fn
    assert kernel.arg_names == ["x_ptr", "y_ptr", "n", "stride", "BLOCK", "EVEN"]
    assert (kernel.keys, kernel.key_idx) == (["stride", "n"], (3, 2))
    assert kernel.configs == CONFIGS and kernel.best_config is None
    kernel[(1,)](Tensor(), Tensor(), 33, 5)
    assert kernel.best_config is CONFIGS[0]
    assert list(kernel.cache.values()) == [CONFIGS[0]]
    with pytest.raises(TypeError, match="with a grid"):
        kernel(Tensor(), Tensor(), 33, 5)


def test_warmup_compiles_every_config_and_launches_none(gpu):
    kernel = decorate(configs=CONFIGS)
    compiled = kernel.warmup(torch.float32, torch.float32, 33, 5, grid=(1,))
    assert [item.src.constants[(4,)] for item in compiled] == [16, 32, 64]
    assert gpu.order == []


def test_the_interpreter_runs_the_chosen_config_on_the_cpu(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import torch, triton, triton.language as tl
        from stoneware.triton_autotune.decorator import autotune
        from stoneware.tuning.context import tuning

        @autotune(
            configs=[triton.Config({"BLOCK": block}) for block in (16, 32)], key=["n"],
            do_bench=lambda call, quantiles: (call(), 1.0 / call.arguments["BLOCK"])[1],
            reset_to_zero=["y_ptr"],
        )
        @triton.heuristics({"TWICE": lambda args: args["BLOCK"] * 2})
        @triton.jit
        def add(x_ptr, y_ptr, n, BLOCK: tl.constexpr, TWICE: tl.constexpr):
            offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            mask = offsets < n
            old = tl.load(y_ptr + offsets, mask=mask)
            tl.store(y_ptr + offsets, old + tl.load(x_ptr + offsets, mask=mask) * TWICE, mask=mask)

        grid = lambda meta: (triton.cdiv(100, meta["BLOCK"]),)
        x, y = torch.randn(100), torch.zeros(100)
        add[grid](x, y, 100)
        assert add.best_config.kwargs["BLOCK"] == 16
        assert torch.equal(y, x * 32)
        y.zero_()
        with tuning("on_miss"):
            add[grid](x, y, 100)
            assert add.best_config.kwargs["BLOCK"] == 32
        assert torch.equal(y, x * 64), (y / x)
    """)
    )
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "STONEWARE_CACHE_DIR": str(tmp_path / "tuning"),
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "tuning").exists()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"configs": [{"TILE": 64}], "key": ["count"]}, r"configs\[0\]=.* must be a triton.Config, not"),
        ({"configs": "abc", "key": ["count"]}, "configs='abc' must be a list of triton.Config"),
        ({"configs": None, "key": ["count"]}, "configs=None must be a list of triton.Config"),
        ({"configs": ONE, "key": "count"}, r"key='count' must be a list of names; write \['count'\]"),
        (
            {"configs": ONE, "key": ["count"], "prune_configs_by": {"nope": 3}},
            "prune_configs_by=.* must be a dict with some of early_config_prune",
        ),
    ],
)
def test_wrong_arguments_are_refused_where_the_kernel_is_decorated(arguments, message):
    import triton

    @triton.jit
    def kernel(x, count):
        pass

    with pytest.raises((TypeError, ValueError), match=message):
        sw.autotune(**arguments)(kernel)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_launch_without_a_gpu_names_the_remedy():
    with pytest.raises(UnsupportedError, match="scale must be launched on a machine with a GPU.*TRITON_INTERPRET=1"):
        decorate()[(1,)](Tensor(4096), Tensor(8192), 100)


def test_a_plain_function_is_refused():
    with pytest.raises(TypeError, match="must decorate a kernel, and plain is a plain function"):

        @sw.autotune(configs=ONE, key=[])
        def plain(x):
            pass
