"""What is recorded about the machine, with an NVML that is not there or is made up."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from stoneware.measuring import machine
from stoneware.runtime import nvml as nvml_module
from stoneware.runtime.device import Device, DeviceFingerprint
from stoneware.tuning.samples import Run

FINGERPRINT = DeviceFingerprint(
    name="NVIDIA H200", compute_capability=(9, 0), num_sms=132, l2_bytes=62914560, memory_clock_khz=3201000
)


class NVMLError(Exception):
    pass


def fake_nvml(**answers) -> types.ModuleType:
    module = types.ModuleType("pynvml")
    module.NVMLError = NVMLError
    module.NVML_CLOCK_SM, module.NVML_CLOCK_MEM = 1, 2
    module.nvmlInit = lambda: None
    module.nvmlSystemGetDriverVersion = lambda: "580.1"
    module.handles = []

    def by_uuid(uuid: str) -> str:
        module.handles.append(uuid)
        return uuid

    module.nvmlDeviceGetHandleByUUID = by_uuid
    module.nvmlDeviceGetPowerManagementLimit = lambda handle: 699_600
    module.nvmlDeviceGetClockInfo = lambda handle, kind: {1: 1980, 2: 3201}[kind]
    vars(module).update(answers)
    return module


@pytest.fixture(autouse=True)
def _gpu(monkeypatch):
    properties = types.SimpleNamespace(uuid="1234-ab")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda ordinal: properties)
    device = Device(ordinal=0, fingerprint=FINGERPRINT)
    monkeypatch.setattr(machine, "cuda_device", lambda ordinal: device)
    for cached in (nvml_module.library_and_handle, nvml_module._warn):
        cached.cache_clear()
    yield
    for cached in (nvml_module.library_and_handle, nvml_module._warn):
        cached.cache_clear()


def test_a_gpu_is_asked_for_by_its_uuid_once(monkeypatch):
    nvml = fake_nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    asked = machine.power_limit_w(0), machine.sm_clock_mhz(0), machine.memory_clock_mhz(0)
    assert asked == (700, 1980, 3201)
    assert nvml.handles == ["GPU-1234-ab"]


def no_driver() -> None:
    raise NVMLError("Driver Not Loaded")


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (None, "pip install nvidia-ml-py"),
        (fake_nvml(nvmlInit=no_driver), "Driver Not Loaded"),
        (
            fake_nvml(
                nvmlDeviceGetPowerManagementLimit=lambda handle: no_driver(),
                nvmlDeviceGetClockInfo=lambda handle, kind: no_driver(),
            ),
            "Driver Not Loaded",
        ),
    ],
    ids=["no package", "no driver", "not supported"],
)
def test_without_an_answer_all_is_unknown_and_it_is_said_once(monkeypatch, caplog, nvml, reason):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    for _ in range(3):
        assert machine.power_limit_w(0) == machine.sm_clock_mhz(0) == 0
    assert caplog.text.count(reason) == 1


def test_a_run_has_the_power_limit_and_the_clocks_of_its_start_and_end(monkeypatch):
    clocks = iter([1980, 1965])
    nvml = fake_nvml(nvmlDeviceGetClockInfo=lambda handle, kind: next(clocks) if kind == 1 else 3201)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    run = machine.new_run(0, "stoneware tune", "60d30ac")
    assert run.device.power_limit_w == 700 and run.device.name == "NVIDIA H200"
    assert (run.sm_clock_mhz_before, run.sm_clock_mhz_after) == (1980, 0)
    ended = machine.end_run(run, 0)
    assert (ended.id, ended.sm_clock_mhz_before, ended.sm_clock_mhz_after) == (run.id, 1980, 1965)
    assert Run.from_json(ended.to_json()) == ended


def test_runs_that_start_within_a_second_have_different_ids(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    assert len({machine.new_run(0, "stoneware tune").id for _ in range(5)}) == 5
