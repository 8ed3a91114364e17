"""The options of sw.autotune act as triton.autotune's: hooks, resetting, pruning, deprecated ones."""

from __future__ import annotations

import sys

import pytest
import triton
from decorated_kernels import CONFIGS, FAST_32, bench_by, call, decorate, gpu, keep, sample, scale  # noqa: F401  (a fixture)
from fake_gpu import Tensor

import stoneware as sw
from stoneware.triton_autotune import tuner


def test_tritons_hooks_do_not_switch_persistence_off(gpu):
    """triton.autotune(cache_results=True) keeps nothing if a config has a pre_hook."""
    configs = [triton.Config(config.kwargs, pre_hook=lambda args: None) for config in CONFIGS]
    timed_blocks, hooks = (
        [],
        {"pre_hook": lambda args, reset_only=False: None, "post_hook": lambda args, exception: None},
    )
    for _ in range(2):
        with sw.tuning("on_miss"):
            bench = bench_by(FAST_32, timed_blocks)
            assert call(decorate(configs=configs, do_bench=bench, **hooks)) == 32
    assert timed_blocks == [16, 32, 64]


def test_hooks_run_as_in_triton(gpu):
    log = []

    def bench(candidate, quantiles):
        log.append(f"bench {candidate.arguments['BLOCK']}")
        candidate()
        return [1.0, 1.0, 1.0]

    kernel = decorate(
        configs=[triton.Config({"BLOCK": block}, pre_hook=lambda args: log.append("config")) for block in (16, 32)],
        do_bench=bench,
        pre_hook=lambda args, reset_only=False: log.append(f"pre {reset_only}"),
        post_hook=lambda args, exception: log.append(f"post {exception}"),
    )
    with sw.tuning("on_miss"):
        call(kernel)
        assert log == [
            "bench 16",
            "config",
            "pre False",
            "post None",
            "bench 32",
            "config",
            "pre False",
            "post None",
            "pre True",
            "config",
        ]
        log.clear()
        call(kernel)
    assert log == ["config"]


def test_tensors_are_zeroed_and_restored_around_each_measured_launch(gpu):
    x, y = Tensor(), Tensor()
    kernel = decorate(configs=CONFIGS[:2], do_bench=bench_by(FAST_32), reset_to_zero=["y_ptr"], restore_value=["x_ptr"])
    with sw.tuning("on_miss"):
        for _ in range(2):
            kernel[(1,)](x, y, 33, 5)
    assert x.log == ["cloned", "restored"] * 2
    assert y.log == ["zeroed"] * 3  # the last for the launch that counts


def test_a_single_config_is_never_measured(gpu):
    timed_blocks = []
    with sw.tuning("on_miss"):
        call(decorate(configs=CONFIGS[:1], do_bench=bench_by(FAST_32, timed_blocks)))
    assert timed_blocks == []


def test_pruning_gets_what_triton_gives_it_and_bounds_the_choice(gpu):
    seen = []

    def prune(configs, named, **kwargs):
        seen.append((dict(named), kwargs))
        return [config for config in configs if config.kwargs["BLOCK"] > 16]

    keep(sample(16, 1.0), sample(64, 2.0), sample(32, 3.0))
    kernel = decorate(prune_configs_by={"early_config_prune": prune})
    x, y = Tensor(), Tensor()
    kernel[(9,)](x, y, 33, stride=5)
    assert kernel.best_config.kwargs["BLOCK"] == 64
    kwargs = {"stride": 5, "grid": (9,), "warmup": False}
    assert seen == [({"x_ptr": x, "y_ptr": y, "n": 33}, kwargs)]


def test_pruning_that_leaves_nothing_is_tritons_error(gpu):
    from triton.runtime.errors import AutotunerError

    kernel = decorate(prune_configs_by={"early_config_prune": lambda *_, **__: []})
    with pytest.raises(AutotunerError, match="should return at least one config"):
        call(kernel)


@pytest.mark.parametrize("top_k, timed_blocks", [(1, [64]), (2, [64, 32]), (0.4, [64]), (1.0, [16, 32, 64])])
def test_a_perf_model_picks_what_is_measured(gpu, top_k, timed_blocks):
    blocks = []
    with sw.tuning("on_miss"):
        call(
            decorate(
                do_bench=bench_by(FAST_32, blocks),
                prune_configs_by={"perf_model": lambda BLOCK, n, **_: n / BLOCK, "top_k": top_k},
            )
        )
    assert blocks == (timed_blocks if len(timed_blocks) > 1 else [])


def test_a_top_k_that_is_no_fraction_is_refused():
    with pytest.raises(TypeError, match="top_k=1.5 must be"):
        decorate(prune_configs_by={"top_k": 1.5})


@pytest.mark.parametrize("options", [{"warmup": 3, "rep": 7}, {"use_cuda_graph": True, "rep": 9}])
def test_deprecated_options_are_honoured(gpu, monkeypatch, options):
    from triton import testing

    seen = []

    def bench(name):
        return lambda call, **kwargs: (seen.append((name, kwargs)), [1.0, 1.0, 1.0])[1]

    monkeypatch.setattr(testing, "do_bench", bench("do_bench"))
    monkeypatch.setattr(testing, "do_bench_cudagraph", bench("do_bench_cudagraph"))
    with pytest.warns(DeprecationWarning) as warned:
        kernel = sw.autotune(CONFIGS, ["n"], **options)(scale)
    assert warned[0].filename == __file__  # where the user can fix it
    with sw.tuning("on_miss"):
        call(kernel)
    names = {"rep": 9} if "use_cuda_graph" in options else {"warmup": 3, "rep": 7}
    wanted = "do_bench_cudagraph" if "use_cuda_graph" in options else "do_bench"
    assert seen == [(wanted, {**names, "quantiles": tuner.QUANTILES})] * 3


def test_configs_that_differ_in_their_hook_alone_are_both_measured(gpu):
    timed_blocks = []

    def hook_of_config(args): ...

    configs = [triton.Config({"BLOCK": 16}, pre_hook=hook) for hook in (None, hook_of_config)]

    def bench(candidate, quantiles):
        timed_blocks.append(candidate.config.pre_hook)
        return 2.0 - len(timed_blocks) / 2

    with sw.tuning("on_miss"):
        kernel = decorate(configs=configs, do_bench=bench)
        call(kernel)
    assert timed_blocks == [None, hook_of_config] and kernel.best_config is configs[1]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
