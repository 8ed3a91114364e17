"""stoneware.runtime._driver.Kernel: what reaches the driver, how often, and in which context."""

from __future__ import annotations

import struct
from typing import Any

import pytest

_MAX_DYNAMIC_SHARED_BYTES = "8"  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES in cuda.h


def test_every_argument_reaches_the_launch(run_with_fake: Any) -> None:
    (launch,) = run_with_fake("""
        from stoneware.runtime import _driver
        fake.set_parameter_bytes([8, 4, 8, 4, 4])
        kernel = _driver.Kernel(fake.cubin(), "k", "Piqff", 96, 1024)
        kernel.launch(0, 77, 4, 5, 6, 2**64 - 1, -2, -3, 1.5, 2)
        report(fake.calls("cuLaunchKernelEx"))
    """)
    assert launch["grid"] == "4,5,6"
    assert launch["cluster"] == "0,0,0"  # no cluster
    assert launch["block"] == "96,1,1"
    assert launch["shared_bytes"] == "1024"
    assert launch["stream"] == "77"
    expected = ["<Q", 2**64 - 1], ["<i", -2], ["<q", -3], ["<f", 1.5], ["<f", 2.0]
    assert launch["parameters"] == ",".join(struct.pack(*pair).hex() for pair in expected)


def test_threads_that_meet_at_first_use_load_once(run_with_fake: Any) -> None:
    names, errors, stacks = run_with_fake(
        """
        import threading
        from stoneware.runtime import _driver
        kernel = _driver.Kernel(fake.cubin(), "k", "", 32, 65536)
        barrier = threading.Barrier(32)
        errors, stacks = [], []
        def use():
            barrier.wait()
            errors.append(error_of(kernel.launch, 0, 0, 1, 1, 1))
            stacks.append(fake.context_stack())
        threads = [threading.Thread(target=use) for _ in range(32)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        looked_up = [call["symbol"] for call in fake.calls("cuGetProcAddress_v2")]
        assert len(looked_up) == len(set(looked_up)), looked_up
        report([fake.call_names(), errors, stacks])
        """,
        FAKE_LIBCUDA_SLOW_MS="50",
    )
    assert errors == [None] * 32
    assert stacks == [""] * 32
    assert names.count("cuLaunchKernelEx") == 32
    for once in (
        "cuInit",
        "cuDriverGetVersion",
        "cuDevicePrimaryCtxRetain",
        "cuLibraryLoadData",
        "cuLibraryGetKernel",
        "cuKernelSetAttribute",
        "cuKernelGetFunction",
    ):
        assert names.count(once) == 1, once


def test_a_kernel_is_loaded_once_for_all_contexts_of_a_device(run_with_fake: Any) -> None:
    names, launches, attributes, [found] = run_with_fake("""
        from stoneware.runtime import _driver
        kernel = _driver.Kernel(fake.cubin(), "k", "", 32, 65536)
        for _ in range(2):
            fake.push_new_context(0)
            kernel.launch(0, 0, 1, 1, 1)
            kernel.launch(0, 0, 1, 1, 1)
        report([fake.call_names(), fake.calls("cuLaunchKernelEx"),
                fake.calls("cuKernelSetAttribute"), fake.calls("cuLibraryGetKernel")])
    """)
    assert names.count("cuLibraryLoadData") == 1
    assert names.count("cuKernelGetFunction") == 1
    assert names.count("cuCtxPushCurrent") == 0
    first, again, second, second_again = launches
    assert first["context"] == again["context"] == "1"
    assert second["context"] == second_again["context"] == "2"
    # The kernel itself: a function would be the first context's.
    assert {launch["function"] for launch in launches} == {found["kernel"]}
    assert attributes == [{"attribute": _MAX_DYNAMIC_SHARED_BYTES, "value": "65536", "symbol": "k", "device": "0"}]


def test_attributes_are_set_once_per_device(run_with_fake: Any) -> None:
    devices, launches = run_with_fake(
        """
        from stoneware.runtime import _driver
        kernel = _driver.Kernel(fake.cubin(), "k", "", 32, 65536)
        for device in (0, 1, 0, 1):
            kernel.launch(device, 0, 1, 1, 1)
        report([[call["device"] for call in fake.calls("cuKernelSetAttribute")],
                [call["device"] for call in fake.calls("cuLaunchKernelEx")]])
        """,
        FAKE_LIBCUDA_DEVICES="2",
    )
    assert devices == ["0", "1"]
    assert launches == ["0", "1", "0", "1"]


def test_a_small_kernel_asks_for_no_shared_memory(run_with_fake: Any) -> None:
    attributes = run_with_fake("""
        from stoneware.runtime import _driver
        _driver.Kernel(fake.cubin(), "k", "", 32, 49152).launch(0, 0, 1, 1, 1)
        report(fake.calls("cuKernelSetAttribute"))
    """)
    assert attributes == []


def test_a_context_of_another_device_is_left_as_it_was(run_with_fake: Any) -> None:
    launches, before, after = run_with_fake(
        """
        from stoneware.runtime import _driver
        kernel = _driver.Kernel(fake.cubin(), "k", "", 32, 0)
        fake.push_new_context(0)
        before = fake.context_stack()
        kernel.launch(1, 0, 1, 1, 1)
        report([fake.calls("cuLaunchKernelEx"), before, fake.context_stack()])
        """,
        FAKE_LIBCUDA_DEVICES="2",
    )
    assert launches[0]["device"] == "1"
    assert before == after == "1,"


def test_a_warm_launch_asks_the_driver_for_nothing_it_knows(run_with_fake: Any) -> None:
    names = run_with_fake("""
        from stoneware.runtime import _driver
        kernel = _driver.Kernel(fake.cubin(), "k", "", 32, 65536)
        fake.push_new_context(0)
        kernel.launch(0, 0, 1, 1, 1)
        fake.forget_calls()
        kernel.launch(0, 0, 1, 1, 1)
        report(fake.call_names())
    """)
    assert names == ["cuCtxGetCurrent", "cuCtxGetDevice", "cuLaunchKernelEx"]


@pytest.mark.parametrize(
    ("sizes", "difference"),
    [
        ([8, 8], "parameter 1 has 4 bytes on the host and 8 in the cubin"),
        ([8], "the host passes 2 and the cubin takes 1"),
        ([8, 4, 4], "the host passes 2 and the cubin takes more"),
    ],
)
def test_a_cubin_with_other_parameters_is_refused(sizes: list[int], difference: str, run_with_fake: Any) -> None:
    error, launches = run_with_fake(f"""
        from stoneware.runtime import _driver
        fake.set_parameter_bytes({sizes})
        kernel = _driver.Kernel(fake.cubin(), "k", "Pi", 32, 0)
        report([error_of(kernel.launch, 0, 0, 1, 1, 1, 0, 0), fake.calls("cuLaunchKernelEx")])
    """)
    assert (error["call"], error["code_name"]) == ("cuKernelGetParamInfo", "KERNEL_PARAMETERS_DIFFER")
    assert difference in error["message"] and "reinstall" in error["message"]
    assert launches == []


# On an H200 (driver 580) it is cuLibraryGetKernel that refuses; a driver may do so at any of them.
@pytest.mark.parametrize("call", ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction"])
def test_a_cubin_that_does_not_fit_the_gpu_names_both(call: str, run_with_fake: Any) -> None:
    error = run_with_fake(f"""
        from stoneware.runtime import _driver
        fake.fail("{call}", 209)
        report(error_of(_driver.Kernel(fake.cubin(90), "k", "", 32, 0).launch, 0, 0, 1, 1, 1))
    """)
    assert (error["call"], error["code_name"]) == (call, "CUDA_ERROR_NO_BINARY_FOR_GPU")
    assert "a cubin for sm_90" in error["message"]
    assert "compute capability 8.0" in error["message"]
    assert "another backend" in error["message"]


def test_a_fat_binary_is_loaded_like_a_cubin(run_with_fake: Any) -> None:
    names = run_with_fake("""
        from stoneware.runtime import _driver
        _driver.Kernel(fake.fatbin(), "k", "", 32, 0).launch(0, 0, 1, 1, 1)
        report(fake.call_names())
    """)
    assert names.count("cuLibraryLoadData") == names.count("cuLaunchKernelEx") == 1


@pytest.mark.parametrize(
    ("arguments", "type_name", "part"),
    [
        ("b'', 'k', 'P', 32, 0", "ValueError", "these are 0 bytes"),
        ("b'x' * 64, 'k', 'P', 32, 0", "ValueError", "do not begin like one"),
        ("fake.cubin()[:40], 'k', 'P', 32, 0", "ValueError", "less than an ELF header"),
        ("fake.cubin()[:40] + b'\\xff' * 24, 'k', 'P', 32, 0", "ValueError", "cut short"),
        ("fake.fatbin()[:8], 'k', 'P', 32, 0", "ValueError", "its 8 bytes end before its content"),
        ("fake.fatbin()[:-1], 'k', 'P', 32, 0", "ValueError", "a fat binary must be whole"),
        ("fake.cubin(), 'k', 'PX', 32, 0", "ValueError", "has 'X'"),
        ("fake.cubin(), 'k', 'P' * 65, 32, 0", "ValueError", "lists 65"),
        ("'text', 'k', 'P', 32, 0", "TypeError", ""),
        ("fake.cubin(), 'k', 'P', 32", "TypeError", ""),
    ],
)
def test_wrong_constructor_arguments_are_refused(arguments: str, type_name: str, part: str, run_with_fake: Any) -> None:
    error = run_with_fake(f"""
        from stoneware.runtime import _driver
        report(error_of(lambda: _driver.Kernel({arguments})))
    """)
    assert error["type"] == type_name
    assert part in error["message"]


@pytest.mark.parametrize(
    ("arguments", "type_name", "part"),
    [
        ("0, 0, 2, 1, 1", "TypeError", "takes 3 arguments"),
        ("0, 0, 2, 1, 1, 1, 2, 3, 4", "TypeError", "got 4"),
        ("0, 0, 2, 1, 1, 'a', 2, 3.0", "TypeError", "argument 0 must be an address"),
        ("0, 0, 2, 1, 1, -1, 2, 3.0", "ValueError", "but is -1"),
        ("0, 0, 2, 1, 1, 1, 2**31, 3.0", "ValueError", "argument 1 must be an int of 32 bits"),
        ("0, 0, 2, 1, 1, 1, 2.5, 3.0", "TypeError", "argument 1"),
        ("0, 0, 2, 1, 1, 1, 2, 'x'", "TypeError", "argument 2 must be a float"),
        ("0, 0, 0, 1, 1, 1, 2, 3.0", "ValueError", "grid_x must be positive, but is 0"),
        ("0, 0, 1, 1, 0, 1, 2, 3.0", "ValueError", "grid_z"),
    ],
)
def test_wrong_launch_arguments_are_refused(arguments: str, type_name: str, part: str, run_with_fake: Any) -> None:
    error, names = run_with_fake(f"""
        from stoneware.runtime import _driver
        kernel = _driver.Kernel(fake.cubin(), "k", "Pif", 32, 0)
        report([error_of(kernel.launch, {arguments}), fake.call_names()])
    """)
    assert error["type"] == type_name
    assert part in error["message"]
    assert names == []


_PLAN = """
from stoneware.runtime import _driver
fake.set_parameter_bytes([8, 4, 8, 4, 4])
kernel = _driver.Kernel(fake.cubin(), "k", "Piqfi", 96, 1024)
arguments = [("address", 1), 5, -3, 1.5, ("presence", 0)]
"""


def test_a_plan_queues_its_launches_with_the_tensors_of_the_call(run_with_fake: Any) -> None:
    launches = run_with_fake(f"""{_PLAN}
plan = _driver.Plan(0, 2, [(kernel, (4, 5, 6), arguments), (kernel, (1, 1, 1), [("address", 0), *arguments[1:]])])
plan(77, [0, 2**63])
plan(78, [16, 32])
report(fake.calls("cuLaunchKernelEx"))
    """)
    assert [(launch["grid"], launch["stream"]) for launch in launches] == [
        ("4,5,6", "77"),
        ("1,1,1", "77"),
        ("4,5,6", "78"),
        ("1,1,1", "78"),
    ]
    pairs = [(2**63, 0), (0, 0), (32, 1), (16, 1)]
    assert [launch["parameters"] for launch in launches] == [
        ",".join(
            struct.pack(kind, value).hex()
            for kind, value in (("<Q", address), ("<i", 5), ("<q", -3), ("<f", 1.5), ("<i", presence))
        )
        for address, presence in pairs
    ]


@pytest.mark.parametrize(
    ("call", "type_name", "part"),
    [
        ("_driver.Plan(0, 2, [(kernel, (1, 1, 1), arguments[:4])])", "TypeError", "takes 5 arguments"),
        ("_driver.Plan(0, 2, [(kernel, (0, 1, 1), arguments)])", "ValueError", "grid_x must be positive"),
        ("_driver.Plan(0, 1, [(kernel, (1, 1, 1), arguments)])", "ValueError", "with a tensor below 1"),
        ('_driver.Plan(0, 2, [(kernel, (1, 1, 1), [5, ("address", 0), *arguments[2:]])])', "ValueError", "argument 1"),
        ('_driver.Plan(0, 2, [(kernel, (1, 1, 1), [("presence", 0), *arguments[1:]])])', "ValueError", "argument 0"),
        ("_driver.Plan(0, 2, [(kernel, (1, 1, 1), arguments)])(0, [16])", "TypeError", "takes 2 addresses, but got 1"),
    ],
)
def test_a_plan_that_cannot_be_launched_is_refused(call: str, type_name: str, part: str, run_with_fake: Any) -> None:
    error = run_with_fake(f"""{_PLAN}
report(error_of(lambda: {call}))
    """)
    assert error["type"] == type_name
    assert part in error["message"]
