"""A call of sw.scaled_mm that was made before: from Python to cuLaunchKernelEx without Python.

CPU tensors stand for an H200's, the modules are the real ones, libcuda is the fake.
"""

from __future__ import annotations

from typing import Any

_PRELUDE = """
import sys
import torch
import stoneware as sw
from stoneware.kernels.config import Config
from stoneware.ops import _cutlass_sm90 as module, tensor_checks
from stoneware.ops.scaled_mm import api
from stoneware.runtime.device import Device, DeviceFingerprint

fingerprint = DeviceFingerprint(
    name="NVIDIA H200", compute_capability=(9, 0), num_sms=132, l2_bytes=62914560,
    memory_clock_khz=3201000, power_limit_w=700)
tensor_checks.CPU = Device(kind="cuda", fingerprint=fingerprint, ordinal=0)
torch._C._cuda_getCurrentRawStream = lambda ordinal: 0
[kernel] = [entry for entry in module.kernels()
            if "128x128x128_2x1x1_pingpong" in entry["id"] and "e4m3_e4m3_bf16" in entry["id"]]
fake.set_parameter_bytes([kernel["params_bytes"]])
config = Config(backend="cutlass_sm90", kernel=kernel["id"])
a = torch.zeros(64, 128, dtype=torch.float8_e4m3fn)
b = torch.zeros(256, 128, dtype=torch.float8_e4m3fn).t()
scales = torch.ones(64, 1), torch.ones(1, 256)
out = torch.empty(64, 256, dtype=torch.bfloat16)
def call(**options):
    return sw.scaled_mm(a, b, *scales, config=config, **options)
def addresses():
    maps = fake.calls("cuLaunchKernelEx")[-1]["maps"]
    return [int(each.split(":")[0]) for each in maps.split(",")]
"""


def test_a_known_call_runs_no_python_below_the_op(run_with_fake: Any) -> None:
    frames, launches, hits, expected, found = run_with_fake(f"""{_PRELUDE}
call(out=out)
fake.forget_calls()
frames = []
sys.setprofile(lambda frame, event, argument:
               frames.append(frame.f_code.co_name) if event == "call" else None)
call(out=out)
sys.setprofile(None)
report([frames, len(fake.calls("cuLaunchKernelEx")), api._PLANS.fast.num_hits,
        [a.data_ptr(), b.data_ptr(), out.data_ptr()], addresses()])
    """)
    assert frames == ["call", "scaled_mm", "is_dynamo_compiling"]
    assert (launches, hits) == (1, 1)
    assert found == expected


def test_an_output_that_is_allocated_is_the_one_that_is_written(run_with_fake: Any) -> None:
    shape, dtype, expected, found = run_with_fake(f"""{_PRELUDE}
call()
result = call()
report([result.shape, str(result.dtype), result.data_ptr(), addresses()[2]])
    """)
    assert (shape, dtype) == ([64, 256], "torch.bfloat16")
    assert found == expected


def test_a_refusal_of_the_driver_is_its_error(run_with_fake: Any) -> None:
    errors = run_with_fake(f"""{_PRELUDE}
call(out=out)
fake.fail("cuLaunchKernelEx", 700)
error = error_of(call, out=out)
fake.fail("cuLaunchKernelEx", 0)
report([error, error_of(call, out=out), error_of(call)])
    """)
    assert errors[0]["type"] == "DriverError"
    assert (errors[0]["call"], errors[0]["code"]) == ("cuLaunchKernelEx", 700)
    assert errors[1:] == [None, None]


def test_a_plan_lives_as_long_as_the_launch_that_was_taken_of_it(run_with_fake: Any) -> None:
    launches = run_with_fake(f"""{_PRELUDE}
import gc
from stoneware.tuning import policy as tuning
for _ in range(3):
    call(out=out)
    api._PLANS.fast.clear()
    gc.collect()
    call(out=out)
    tuning.forget_plans()
report(len(fake.calls("cuLaunchKernelEx")))
    """)
    assert launches == 6


def test_an_unknown_tensor_of_a_native_launch_is_refused(run_with_fake: Any) -> None:
    error = run_with_fake(f"""{_PRELUDE}
plan = module.Plan(kernel["id"], m=64, n=256, k=128, lda=128, ldb=128, ldd=256, device=0,
                   num_sms=132, scale_a="row", scale_b="row")
report(error_of(plan.native_launch, ["a", "weight"]))
    """)
    assert error["type"] == "ValueError"
    assert "but has weight" in error["message"]
