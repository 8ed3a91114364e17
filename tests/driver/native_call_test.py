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
from stoneware.ops import _sm90 as module, tensor_checks
from stoneware.ops.scaled_mm import api
from stoneware.runtime.device import Device, DeviceFingerprint

fingerprint = DeviceFingerprint(
    name="NVIDIA H200", compute_capability=(9, 0), num_sms=132, l2_bytes=62914560,
    memory_clock_khz=3201000, power_limit_w=700)
tensor_checks.CPU = Device(fingerprint=fingerprint, ordinal=0)
torch._C._cuda_getCurrentRawStream = lambda ordinal: 0
[kernel] = [entry for entry in module.kernels() if entry["id"].endswith("_128x192x128_2x1x1_pingpong")]
fake.set_parameter_bytes([kernel["params_bytes"]])
config = Config(backend="sm90", kernel=kernel["id"])
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


def test_a_call_allocates_the_workspace_of_its_kernel(run_with_fake: Any) -> None:
    launches, hits = run_with_fake(f"""{_PRELUDE}
from stoneware.ops.matmul import api
[kernel] = [entry for entry in module.kernels() if "bf16_64x96x64_4x1x1_splitk1x10_grid" in entry["id"]]
fake.set_parameter_bytes([kernel["params_bytes"]])
config = Config(backend="sm90", kernel=kernel["id"], splits=3)
a, b = torch.zeros(300, 512, dtype=torch.bfloat16), torch.zeros(1000, 512, dtype=torch.bfloat16)
for _ in range(2):
    sw.matmul(a, b.t(), config=config)
report([fake.calls("cuLaunchKernelEx"), api._PLANS.fast.num_hits])
    """)
    assert [launch["grid"] for launch in launches] == ["264,1,1"] * 2
    assert hits == 1


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
from stoneware.tuning import policy
for _ in range(3):
    call(out=out)
    api._PLANS.fast.clear()
    gc.collect()
    call(out=out)
    policy.forget_plans()
report(len(fake.calls("cuLaunchKernelEx")))
    """)
    assert launches == 6


def test_an_unknown_tensor_of_a_plan_is_refused(run_with_fake: Any) -> None:
    error = run_with_fake(f"""{_PRELUDE}
report(error_of(module.Plan, kernel["id"], tensors=["a", "weight"], m=64, n=256, k=128, lda=128, ldb=128,
                ldd=256, device=0, num_sms=132, scale_a="row", scale_b="row"))
    """)
    assert error["type"] == "ValueError"
    assert "but is weight" in error["message"]


_SEVERAL = """
import torch
from stoneware.ops import _call
from stoneware.runtime import _driver
torch._C._cuda_getCurrentRawStream = lambda ordinal: 0
fake.set_parameter_bytes([8, 8])
kernel = _driver.Kernel(fake.cubin(), "k", "PP", 32, 0)
double = _driver.Plan(0, 2, [(kernel, (1, 1, 1), [("address", 0), ("address", 1)])])
x = torch.ones(4)
def made(native_launch):
    def run(*tensors):
        raise AssertionError("the native launch stands for it")
    run.native_launch = native_launch
    outputs = tuple(((4,), (1,), dtype) for dtype in (torch.float32, torch.float64, torch.int32))
    return run, True, torch.device("cpu"), outputs
def fast_call(native_launch, *, plan=None, num_results=2):
    return _call.FastCall(
        torch,
        make=lambda *arguments: made(native_launch) if plan is None else (plan, *made(None)[1:]),
        slow=print, state=lambda: None, epoch=[0], enter_thread=print,
        num_tensors=4, num_objects=0, outs=[1, 2, 3], optional=[1, 2, 3], aligned=[0], plan_order=[0, 1, 2, 3],
        max_plans=4, num_results=num_results)
"""


def test_a_plan_of_several_passes_its_tensors_on_and_returns_its_results(run_with_fake: Any) -> None:
    dtypes, addresses, launches = run_with_fake(f"""{_SEVERAL}
call = fast_call([(double.native_launch(), (0, 3), -1), (double.native_launch(), (3, 1), -1)]).call
given = torch.zeros(4, dtype=torch.float64)
first, second = call(x, None, given, None)
launches = [each["parameters"] for each in fake.calls("cuLaunchKernelEx")]
report([[str(first.dtype), str(second.dtype), second is given], [x.data_ptr(), first.data_ptr()], launches])
    """)
    assert dtypes == ["torch.float32", "torch.float64", True]
    pairs = [[int.from_bytes(bytes.fromhex(one), "little") for one in launch.split(",")] for launch in launches]
    assert pairs[0][0] == addresses[0]
    assert pairs[0][1] == pairs[1][0] not in addresses
    assert pairs[1][1] == addresses[1]


def test_a_plan_in_python_runs_between_native_ones(run_with_fake: Any) -> None:
    launched, passed, error = run_with_fake(f"""{_SEVERAL}
passed = []
def step(*tensors):
    passed.append([len(fake.calls("cuLaunchKernelEx")), tensors[0].data_ptr() == x.data_ptr(), str(tensors[1].dtype)])
def failing(*tensors):
    raise KeyError("of the step")
launch = double.native_launch()
fast_call([(launch, (0, 3), -1), (step, (0, 3), -1), (launch, (3, 1), -1)]).call(x, None, None, None)
launched = len(fake.calls("cuLaunchKernelEx"))
report([launched, passed, error_of(fast_call([(launch, (0, 3), -1), (failing, (0,), -1)]).call, x, None, None, None)])
    """)
    assert launched == 2
    assert passed == [[1, True, "torch.int32"]]
    assert error["type"] == "KeyError"


def test_memory_in_between_is_one_allocation(run_with_fake: Any) -> None:
    launches, allocated = run_with_fake(f"""{_SEVERAL}
launch = double.native_launch()
allocated = []
class Mode(torch.overrides.TorchFunctionMode):  # with which outputs are allocated by torch.empty_strided
    def __torch_function__(self, function, types, arguments=(), options=None):
        if function is torch.empty_strided:
            allocated.append(list(arguments[0]))
        return function(*arguments, **(options or dict()))
call = fast_call([(launch, (0, 2), -1), (launch, (2, 3), -1), (launch, (3, 1), -1)], num_results=1).call
with Mode():
    call(x)
report([[each["parameters"] for each in fake.calls("cuLaunchKernelEx")], allocated])
    """)
    pairs = [[int.from_bytes(bytes.fromhex(one), "little") for one in launch.split(",")] for launch in launches]
    assert pairs[1] == [pairs[0][1], pairs[2][0]]
    assert pairs[1][1] - pairs[1][0] == 256  # 4 float64, rounded up
    assert sorted(allocated) == [[4], [512]]


def test_a_step_in_python_may_return_a_result(run_with_fake: Any) -> None:
    found, launches, errors = run_with_fake(f"""{_SEVERAL}
launch = double.native_launch()
steps = [(launch, (0, 3), -1), (torch.neg, (0,), 1), (launch, (1, 2), -1)]
first, second = fast_call(steps).call(x)
found = [first.tolist(), first.data_ptr()]
launches = [each["parameters"] for each in fake.calls("cuLaunchKernelEx")]
errors = [error_of(fast_call(steps).call, x, torch.ones(4)), error_of(fast_call([(torch.neg, (1,), 0)]).call, x)]
report([found, launches, errors])
    """)
    assert found[0] == [-1.0] * 4
    assert int.from_bytes(bytes.fromhex(launches[1].split(",")[0]), "little") == found[1]
    assert [error["type"] for error in errors] == ["ValueError", "ValueError"]
    assert "must be None, because a step returns it" in errors[0]["message"]
    assert "may return an output of the call, but step 0 returns tensor 0" in errors[1]["message"]


def test_a_step_in_python_may_return_what_is_in_between(run_with_fake: Any) -> None:
    first, launch, negative = run_with_fake(f"""{_SEVERAL}
returned = []
def neg(tensor):
    returned.append(torch.neg(tensor))
    return returned[-1]
first, _ = fast_call([(neg, (0,), 3), (double.native_launch(), (3, 1), -1), (torch.sub, (3, 0), 2)]).call(x)
second = fast_call([(neg, (0,), 3), (torch.sub, (3, 0), 2)]).call(x)[1]
report([first.data_ptr(), [fake.calls("cuLaunchKernelEx")[0]["parameters"], returned[0].data_ptr()], second.tolist()])
    """)
    parameters, address = launch
    assert [int.from_bytes(bytes.fromhex(one), "little") for one in parameters.split(",")] == [address, first]
    assert negative == [-2.0] * 4


def test_a_direct_plan_returns_what_its_function_returns(run_with_fake: Any) -> None:
    found, errors = run_with_fake(f"""{_SEVERAL}
class Direct:
    def __init__(self, *direct):
        self.direct = direct
def direct(function, tensors, values=(), num_results=1):
    return fast_call(None, plan=Direct(function, tensors, values), num_results=num_results).call
found = [direct(torch.sub, (0, 0))(x).tolist(), direct(torch.clamp, (0,), (None, 0.5))(x).tolist()]
report([found, [error_of(direct(3, (0,)), x), error_of(direct(torch.neg, (4,)), x)]])
    """)
    assert found == [[0.0] * 4, [0.5] * 4]
    assert [error["type"] for error in errors] == ["TypeError", "ValueError"]


def test_a_direct_plan_takes_negated_views(run_with_fake: Any) -> None:
    given, found, num_slow = run_with_fake(f"""{_SEVERAL}
class Direct:
    direct = torch.neg, (0,), ()
fast = fast_call(None, plan=Direct(), num_results=1)
report([x.tolist(), fast.call(torch._neg_view(x)).tolist(), fast.num_slow])
    """)
    assert found == given and any(given)
    assert num_slow == 0


def test_a_native_launch_of_other_tensors_is_refused(run_with_fake: Any) -> None:
    errors = run_with_fake(f"""{_SEVERAL}
launch = double.native_launch()
report([error_of(fast_call(found).call, x, None, None, None)
        for found in (launch, [(launch, (0,), -1)], [(launch, (0, 4), -1)], [(launch, (0, -1), -1)], [launch])])
    """)
    assert [error["type"] for error in errors] == ["TypeError", "TypeError", "ValueError", "ValueError", "TypeError"]
    assert "must take 4 tensors, but its native launch takes 2" in errors[0]["message"]
    assert "must name tensors of the plan, 0 to 3, but names 4" in errors[2]["message"]
