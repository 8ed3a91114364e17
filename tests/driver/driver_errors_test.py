"""Every way in which the driver can be missing or fail becomes one clear DriverError."""

from __future__ import annotations

from typing import Any

import pytest
from cu_results import CU_RESULTS


def test_importing_calls_nothing(run_with_fake: Any) -> None:
    names = run_with_fake("""
        from stoneware.ops import _sm90
        from stoneware.runtime import _driver
        _sm90.kernels()
        _driver.Kernel(fake.cubin(), "k", "P", 128, 0)
        report(fake.call_names())
    """)
    assert names == []


def test_no_driver_is_named_with_its_remedy(run_without_driver: Any) -> None:
    error = run_without_driver("""
        from stoneware.errors import DriverError
        from stoneware.runtime import _driver
        try:
            _driver.device_count()
        except DriverError as e:
            print(json.dumps([e.call, e.code, e.code_name, str(e)]))
    """)
    call, code, code_name, message = error
    assert (call, code, code_name) == ("dlopen", 0, "DRIVER_NOT_FOUND")
    assert "libcuda.so.1" in message and "install the NVIDIA driver" in message


def test_too_old_a_driver_states_both_versions(run_with_fake: Any) -> None:
    error = run_with_fake(
        """
        from stoneware.runtime import _driver
        report(error_of(_driver.driver_version))
        """,
        FAKE_LIBCUDA_VERSION="12020",
    )
    assert (error["call"], error["code_name"]) == ("cuDriverGetVersion", "DRIVER_TOO_OLD")
    assert "12.4 or newer" in error["message"] and "supports 12.2" in error["message"]
    assert "update the NVIDIA driver" in error["message"]


def test_a_missing_symbol_is_named_and_the_next_call_tries_again(run_with_fake: Any) -> None:
    error, version = run_with_fake(
        """
        from stoneware.runtime import _driver
        error = error_of(_driver.driver_version)
        fake.set_missing("")
        report([error, _driver.driver_version()])
        """,
        FAKE_LIBCUDA_MISSING="cuTensorMapEncodeTiled",
    )
    assert (error["call"], error["code_name"]) == ("cuGetProcAddress_v2", "DRIVER_SYMBOL_MISSING")
    assert "cuTensorMapEncodeTiled" in error["message"]
    assert version == [13, 0]


def test_a_failed_start_is_retried(run_with_fake: Any) -> None:
    error, count, num_inits = run_with_fake(
        """
        from stoneware.runtime import _driver
        fake.fail("cuInit", 802)
        error = error_of(_driver.device_count)
        fake.fail("cuInit", 0)
        count = _driver.device_count()
        _driver.device_count()
        report([error, count, len(fake.calls("cuInit"))])
        """,
        FAKE_LIBCUDA_DEVICES="3",
    )
    assert (error["call"], error["code_name"]) == ("cuInit", "CUDA_ERROR_SYSTEM_NOT_READY")
    assert (count, num_inits) == (3, 2)


def test_a_driver_without_gpu_counts_zero_devices(run_with_fake: Any) -> None:
    count, version = run_with_fake("""
        from stoneware.runtime import _driver
        fake.fail("cuInit", 100)
        report([_driver.device_count(), _driver.driver_version()])
    """)
    assert (count, version) == (0, [13, 0])


def test_device_attributes_are_the_drivers(run_with_fake: Any) -> None:
    attributes, error = run_with_fake("""
        from stoneware.runtime import _driver
        report([_driver.device_attributes(0), error_of(_driver.device_attributes, 7)])
    """)
    assert attributes == {
        "name": "Fake GPU",
        "compute_capability": [8, 0],
        "num_sms": 108,
        "l2_bytes": 41943040,
        "memory_clock_khz": 1215000,
        "memory_bus_bits": 5120,
        "memory_bytes": 40 << 30,
        "shared_bytes_optin": 166912,
    }
    assert (error["call"], error["code"]) == ("cuDeviceGet", 101)
    assert "device 7" in error["message"]


@pytest.fixture(scope="module")
def errors_by_code(run_with_fake: Any) -> dict[str, dict[str, Any]]:
    return run_with_fake(f"""
        from stoneware.runtime import _driver
        kernel = _driver.Kernel(fake.cubin(), "k", "", 32, 0)
        errors = {{}}
        for code in {[*CU_RESULTS.values(), 99999, 99998]}:
            fake.fail("cuLaunchKernelEx", code)
            errors[code] = error_of(kernel.launch, 0, 0, 1, 1, 1)
        report(errors)
    """)


@pytest.mark.parametrize("name", CU_RESULTS)
def test_a_result_is_named_with_what_to_do(name: str, errors_by_code: dict[str, dict[str, Any]]) -> None:
    error = errors_by_code[str(CU_RESULTS[name])]
    assert error["type"] == "DriverError"
    assert error["call"] == "cuLaunchKernelEx"
    assert error["code"] == CU_RESULTS[name]
    assert error["code_name"] == name
    rule, remedy = error["message"].split(": ", 1)
    assert rule.startswith(f"cuLaunchKernelEx must succeed but returned {name} ({error['code']})")
    assert "launching a grid of 1x1x1 blocks" in rule
    assert len(remedy) > 20


def test_a_result_that_the_table_lacks_has_the_drivers_name(errors_by_code: dict[str, dict[str, Any]]) -> None:
    assert errors_by_code["99999"]["code_name"] == "CUDA_ERROR_FROM_THE_FUTURE"
    assert errors_by_code["99998"]["code_name"] == "CUDA_ERROR_WITHOUT_NAME"


# The entry points on the way to a launch that a driver may fail, in the order of their calls.
_CALLS_ON_THE_WAY = [
    "cuGetProcAddress_v2",
    "cuInit",
    "cuCtxGetCurrent",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent",
    "cuLibraryLoadData",
    "cuLibraryGetKernel",
    "cuKernelGetParamInfo",
    "cuKernelSetAttribute",
    "cuKernelGetFunction",
    "cuLaunchKernelEx",
]


@pytest.mark.parametrize("call", _CALLS_ON_THE_WAY)
def test_a_call_that_fails_once_leaves_nothing_broken(call: str, run_with_fake: Any) -> None:
    error, stack_after_error, after, num_launches = run_with_fake(f"""
        from stoneware.runtime import _driver
        kernel = _driver.Kernel(fake.cubin(), "k", "", 32, 65536)
        fake.fail("{call}", 999)
        error = error_of(kernel.launch, 0, 0, 1, 1, 1)
        stack = fake.context_stack()
        fake.fail("{call}", 0)
        fake.forget_calls()
        after = error_of(kernel.launch, 0, 0, 1, 1, 1)
        report([error, stack, after, len(fake.calls("cuLaunchKernelEx"))])
    """)
    assert (error["call"], error["code_name"]) == (call, "CUDA_ERROR_UNKNOWN")
    assert stack_after_error == ""
    assert after is None
    assert num_launches == 1
