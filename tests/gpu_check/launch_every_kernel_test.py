"""What launch_every_kernel.py launches and what it calls wrong, without a GPU."""

from __future__ import annotations

import itertools
import pathlib
import sys

import pytest
import torch

from stoneware import specs
from stoneware.kernels import aot_kernels, manifest, split_k, tile_rule
from stoneware.kernels.config import Config
from stoneware.kernels.manifest import KernelRecord
from stoneware.measuring import operands
from stoneware.quantizing import kernels as quantizing
from stoneware.quantizing import layout
from stoneware.runtime.device import Device, DeviceFingerprint
from stoneware.specs.scaled_mm_problem import BLOCK
from tools.gpu_check import launch_every_kernel, machine

MANIFEST = pathlib.Path("py/stoneware/kernel_manifest.json")
KERNELS = [kernel for kernel in manifest.packaged().kernels.values() if kernel.op in specs.OPS]
H200 = Device(
    ordinal=0,
    fingerprint=DeviceFingerprint(
        name="NVIDIA H200", compute_capability=(9, 0), num_sms=132, l2_bytes=62914560, memory_clock_khz=3201000
    ),
)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.id)
def test_every_kernel_has_launches_that_cut_tiles_off_and_fill_its_stages(kernel):
    launches = launch_every_kernel.launches_of(kernel)
    tiling = tile_rule.tiling_of(kernel)
    first, last = launches[0], launches[-1]
    for launch in launches:
        problem = launch.problem
        assert tile_rule.fits(kernel, problem.key, kernel.compute_capability)
        assert problem.n % tiling.n and problem.n > tiling.n
        # Block scales come for whole blocks of 128, which may be all of a tile.
        assert problem.k % tiling.k or (tiling.k == BLOCK and kernel.config["scales"] == "block")
        rows = launch.counts or (problem.m,)
        assert any(count > tiling.m and count % tiling.m for count in rows)
        assert not launch.counts or (0 in rows and sum(rows) == problem.m)
    stages = kernel.config.get("stages") or kernel.config.get("num_stages", 2)
    assert first.problem.k > stages * tiling.k
    assert operands.takes_bias(first.problem) == getattr(first.problem, "has_bias", False)
    assert not getattr(last.problem, "has_bias", False)
    if kernel.config.get("schedule") == "splitk":
        assert [launch.splits for launch in launches][:2] == [1, 2]
        blocks_along_k = split_k.blocks_along_k(kernel, launches[-2].splits)
        assert blocks_along_k * tiling.cluster_m * tiling.cluster_n <= 8
    clusters = -(-last.problem.n // (tiling.n * tiling.cluster_n)) * (
        -(-max(last.counts or (last.problem.m,)) // (tiling.m * tiling.cluster_m))
    )
    assert clusters * tiling.cluster_m * tiling.cluster_n > last.num_sms


@pytest.mark.parametrize("kernel", machine.runnable(KERNELS, (9, 0)), ids=lambda kernel: kernel.id)
def test_every_launch_has_a_plan_of_its_kernel(kernel, monkeypatch):
    # torch's build for the CPU lacks what a plan needs for the stream when it is launched.
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda ordinal: 0, raising=False)
    for launch in launch_every_kernel.launches_of(kernel):
        launch_every_kernel.plan(launch, kernel, H200)


def test_calls_of_quantize_launch_each_of_its_kernels(monkeypatch):
    launched = set()
    monkeypatch.setattr(quantizing, "_step", lambda launches, device: launched.add(launches[0].variant))
    monkeypatch.setattr(aot_kernels, "plan", lambda *arguments: None)
    for shape, scales, transpose in itertools.product(
        launch_every_kernel.QUANTIZED_SHAPES, layout.SCALES, (False, "both")
    ):
        num_tensors = 3 + 2 * (transpose == "both") + quantizing.has_partial(scales, transpose, False)
        options = scales, transpose, "e4m3", False, False, False
        task = quantizing.Task([torch.empty(shape, dtype=torch.bfloat16)], *options, range(num_tensors))
        quantizing.plan([task], num_tensors, H200)
    kernels = manifest.read_manifest(MANIFEST).kernels.values()
    variants = {
        kernel.id.removeprefix("quantize_").partition("_triton_")[0] for kernel in kernels if kernel.op == quantizing.OP
    }
    prefixes = "amax", "blocks", "column", "rows", "runs", "short", "tiles"
    assert launched == {name for name in variants if name.startswith(prefixes)}


def right(launch, kernel, tensors, device):
    tensors.out.copy_(operands.reference(tensors).to(tensors.out.dtype))


def report_of(kernels, run) -> dict:
    report = launch_every_kernel.Report()
    launch_every_kernel.run_all(kernels, H200, "cpu", run, report)
    return report.to_json(kernels)


def some_kernels() -> list[KernelRecord]:
    """One of each op and layout and kind of scales that an H200 runs."""
    kinds = {
        (kernel.op, kernel.backend, kernel.config.get("layout"), kernel.config.get("scales")): kernel
        for kernel in machine.runnable(KERNELS, (9, 0))
    }
    return list(kinds.values())


def test_runnable_kernels_are_those_of_the_arch():
    assert {kernel.arch for kernel in machine.runnable(KERNELS, (9, 0))} == {"sm_90", "sm_90a"}


def test_right_results_are_no_failures():
    kernels = some_kernels()
    report = report_of(kernels, right)
    assert report["failures"] == [] and report["not_launched"] == []
    assert report["kernels"] == len(kernels) >= 7
    assert report["launches"] == sum(len(launch_every_kernel.launches_of(kernel)) for kernel in kernels)


def test_the_public_ops_take_the_operands():
    reference = Config(backend="reference", kernel="torch.matmul_float32")

    def run(launch, kernel, tensors, device):
        launch_every_kernel.call_op(kernel.op, launch.problem, reference, tensors)

    report = report_of(some_kernels(), run)
    assert report["failures"] == [] and report["launches"] > report["kernels"]


def wrong_element(launch, kernel, tensors, device):
    right(launch, kernel, tensors, device)
    tensors.out[0, 0] += 4 * tensors.out[0].float().abs().max()


def beside_out(launch, kernel, tensors, device):
    right(launch, kernel, tensors, device)
    tensors.out_base[0, 0] = 1


def nothing(launch, kernel, tensors, device):
    pass


@pytest.mark.parametrize(
    ("run", "message"),
    [(wrong_element, "worst element"), (beside_out, "it wrote outside of out"), (nothing, "relative error inf")],
)
def test_what_is_wrong_is_a_failure_of_every_kernel(run, message):
    kernels = some_kernels()
    report = report_of(kernels, run)
    assert {failure["kernel"] for failure in report["failures"]} == {kernel.id for kernel in kernels}
    assert len(report["failures"]) == report["launches"]
    assert all(message in failure["message"] for failure in report["failures"])


def test_a_kernel_that_cannot_be_launched_is_named_and_the_others_are():
    kernels = some_kernels()

    def run(launch, kernel, tensors, device):
        if kernel is kernels[1]:
            raise RuntimeError("no such kernel")
        right(launch, kernel, tensors, device)

    report = report_of(kernels, run)
    assert report["not_launched"] == [kernels[1].id]
    assert report["kernels"] == len(kernels) - 1
    assert {failure["message"] for failure in report["failures"]} == {"RuntimeError: no such kernel"}


def test_a_copy_that_fails_is_named_and_the_other_kernels_are_tried(monkeypatch):
    """As after a fault that took the context with it."""
    kernels = some_kernels()
    copied, num_copies = launch_every_kernel.copied, 0

    def copied_but_the_first(tensors, device):
        nonlocal num_copies
        num_copies += 1
        if num_copies == 1:
            raise RuntimeError("an illegal memory access")
        return copied(tensors, device)

    monkeypatch.setattr(launch_every_kernel, "copied", copied_but_the_first)
    report = report_of(kernels, right)
    assert [(failure["kernel"], failure["message"]) for failure in report["failures"]] == [
        (kernels[0].id, "RuntimeError: an illegal memory access")
    ]
    assert report["not_launched"] == [] and report["kernels"] == len(kernels)


def test_every_call_of_quantize_gives_what_plain_torch_does_and_another_is_a_failure(monkeypatch):
    report = launch_every_kernel.Report()
    launch_every_kernel.quantize_all("cpu", report)
    assert report.failures == [] and report.num_launches == 190
    monkeypatch.setattr(
        launch_every_kernel, "_by_plan", lambda plan, inputs, like, where: [torch.zeros_like(one) for one in like]
    )
    monkeypatch.setattr(launch_every_kernel.layout, "SCALES", ())
    launch_every_kernel.quantize_all("cpu", report)
    assert [failure["message"] for failure in report.failures] == ["other values"] * 50


def all_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """What its memory holds, between the elements too."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


@pytest.mark.parametrize("kernel", some_kernels(), ids=lambda kernel: kernel.id)
def test_a_copy_keeps_strides_and_what_views_skip(kernel):
    tensors = launch_every_kernel.make(launch_every_kernel.launches_of(kernel)[0])
    copies = launch_every_kernel.copied(tensors, "cpu")
    pairs = [(tensors.a, copies.a), (tensors.b, copies.b), (tensors.out_base, copies.out_base)]
    for tensor, copy in [*pairs, *zip(tensors.scales, copies.scales)]:
        assert copy.stride() == tensor.stride() and copy.data_ptr() != tensor.data_ptr()
        assert torch.equal(all_bytes(copy), all_bytes(tensor))
    assert copies.out.untyped_storage().data_ptr() == copies.out_base.untyped_storage().data_ptr()
    assert copies.out.storage_offset() == tensors.out.storage_offset() > 0
    assert copies.out_base.isnan().all() and torch.equal(copies.out.isnan(), tensors.out.isnan())


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
