"""Predictions: how long a kernel would take on a device that nobody measured.

An analytic model with few constants, for choosing among the kernels of a build; its times are
rough (half to one and a half of what an H200 takes), their order is what counts. The time of a
kernel is that of its launch and the largest of

- DRAM: the operands and the result, an operand once for every pass over it if it exceeds half of
  L2;
- L2: the operand bytes of every tile, shared by the blocks of a cluster;
- the busiest SM: whole tiles in whole steps of tile k, a step the largest of its tensor-core,
  shared-memory, load-port and latency time; unless the kernel is persistent, each wave of tiles
  also waits for its first load and its stores.

Whole tiles on whole SMs make a small tile win at small m; bytes per multiply-add make a large one
win at large m. The groups of a grouped product are taken to be even, all of the mean rows.

Deterministic on any machine: integers and IEEE +, -, *, / alone, nothing from libm.

tools/bench/prediction_regret.py compares its choices with samples. The only ones so far are an
H200's, and how tiles share DRAM and L2 was revised once after looking at them, so its figures there
flatter it a little.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stoneware.kernels.config import Config
from stoneware.kernels.cutlass_kernels import TILE_SCHEDULED
from stoneware.kernels.key import Key
from stoneware.kernels.manifest import KernelRecord
from stoneware.kernels.tile_rule import ELEMENT_BYTES, Tiling, fits, tiling_of
from stoneware.runtime.device import DeviceFingerprint

LAUNCH_US = 4.0
"""From the launch to the first load and from the last store to the end: an estimate. It is the same
for every kernel, so no order depends on it."""

LATENCY_US = 0.7
"""Of a load from DRAM, queues included: an estimate."""

LOAD_PORT_BYTES_PER_CLOCK = 64
"""From L2 into one SM: an estimate, two sectors of 32 bytes."""

DATA_CENTRE_L2 = 47
"""Bytes a clock and SM: 5120 of an A100 (its whitepaper, "L2 cache read bandwidth") over 108 SMs;
NVIDIA gives no figure for H100, H200 and B200, which are taken to be alike."""

GDDR_L2 = 16
"""Bytes a clock and SM: an estimate for AD10x and GB202, of which NVIDIA gives no figure; people
report 3.6 to 5 TB/s for an RTX 4090, which are 11 to 16."""

SHARED_MEMORY_BYTES_PER_CLOCK = 128
"""Of one SM: 32 banks of 4 bytes (CUDA C++ Programming Guide, "Shared Memory")."""

MMA_EFFICIENCY = 0.75
"""Part of the tensor cores' nominal rate that a long main loop reaches under the power limit: an
estimate."""

DRAM_EFFICIENCY = 0.8
"""Part of the nominal bandwidth that streaming reads reach: an estimate."""

DEFAULT_STAGES = 3
"""Of Triton's software pipeline (triton.Config), for a manifest that does not tell."""

WIDENING_OPS = 8
"""Integer operations that scaled_mm/triton_kernel.py spends on one e4m3 element below sm_89."""

INTEGER_LANES = 64
"""32-bit integer operations a clock and SM (CUDA C++ Programming Guide, "Arithmetic
Instructions")."""

GROUP_M = 8
"""Rows of tiles that run together, in the Triton kernels (their BUILD files)."""

REPEATED_ROW_CLOCKS = 6
"""Of a step, for each tile row past m: the Triton kernels load the last row again in its place, 128
bytes that one SM asks for many times at once. Median over matmul's H200 samples of
(time at m - time at m=128) / (128 - m) / steps / waves, for m of 1, 16 and 64. Drop it when those
kernels skip rows past m."""


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What the model asks of a device beyond its fingerprint; nominal values.

    Attributes:
      sm_clock_mhz: boost clock, at which the tensor-core rates below are quoted.
      memory_gbytes_per_s: bandwidth of DRAM in 10^9 bytes per second.
      mma_16bit_per_clock, mma_8bit_per_clock: dense multiply-adds of bf16/fp16 and of fp8, with
        fp32 accumulation, per clock and SM; 0 if the device has no fp8.
      l2_bytes_per_clock: what one SM gets from L2 while all ask.
      shared_memory_bytes: of one SM.
    """

    sm_clock_mhz: int
    memory_gbytes_per_s: int
    mma_16bit_per_clock: int
    mma_8bit_per_clock: int
    l2_bytes_per_clock: int
    shared_memory_bytes: int

    def __post_init__(self) -> None:
        for name, least in (
            ("sm_clock_mhz", 1), ("memory_gbytes_per_s", 1), ("mma_16bit_per_clock", 1),
            ("mma_8bit_per_clock", 0), ("l2_bytes_per_clock", 1), ("shared_memory_bytes", 1),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name}={value!r} of device facts must be an int >= {least}")


@dataclass(frozen=True, kw_only=True)
class PredictedDevice:
    """A device that may have no samples.

    Attributes:
      fingerprint: as its driver would give it. Where a number is a little off, the look-up still
        finds the device as the nearest of its compute capability.
      aliases: other names it is known by.
      facts: what the model needs besides.
      source: where the numbers are from.
    """

    fingerprint: DeviceFingerprint
    aliases: tuple[str, ...]
    facts: DeviceFacts
    source: str


PREDICTED_DEVICES: tuple[PredictedDevice, ...] = (
    PredictedDevice(
        fingerprint=DeviceFingerprint(
            name="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0), num_sms=108,
            l2_bytes=41943040, memory_clock_khz=1593000, power_limit_w=400,
        ),
        aliases=("A100", "a100"),
        facts=DeviceFacts(
            sm_clock_mhz=1410, memory_gbytes_per_s=2039, mma_16bit_per_clock=1024,
            mma_8bit_per_clock=0, l2_bytes_per_clock=DATA_CENTRE_L2,
            shared_memory_bytes=164 * 1024,
        ),
        source="NVIDIA A100 Tensor Core GPU Architecture whitepaper and A100 80GB data sheet: "
        "312 TFLOPS bf16 dense, 2039 GB/s, 400 W",
    ),
    PredictedDevice(
        fingerprint=DeviceFingerprint(
            name="NVIDIA L4", compute_capability=(8, 9), num_sms=58, l2_bytes=50331648,
            memory_clock_khz=6251000, power_limit_w=72,
        ),
        aliases=("L4", "l4"),
        facts=DeviceFacts(
            sm_clock_mhz=2040, memory_gbytes_per_s=300, mma_16bit_per_clock=512,
            mma_8bit_per_clock=1024, l2_bytes_per_clock=GDDR_L2,
            shared_memory_bytes=100 * 1024,
        ),
        source="NVIDIA L4 data sheet: 121 TFLOPS bf16 and 242.5 fp8 dense, 300 GB/s, 72 W",
    ),
    PredictedDevice(
        fingerprint=DeviceFingerprint(
            name="NVIDIA L40S", compute_capability=(8, 9), num_sms=142, l2_bytes=100663296,
            memory_clock_khz=9001000, power_limit_w=350,
        ),
        aliases=("L40S", "l40s"),
        facts=DeviceFacts(
            sm_clock_mhz=2520, memory_gbytes_per_s=864, mma_16bit_per_clock=512,
            mma_8bit_per_clock=1024, l2_bytes_per_clock=GDDR_L2,
            shared_memory_bytes=100 * 1024,
        ),
        source="NVIDIA L40S data sheet: 362 TFLOPS bf16 and 733 fp8 dense, 864 GB/s, 350 W",
    ),
    PredictedDevice(
        fingerprint=DeviceFingerprint(
            name="NVIDIA GeForce RTX 4090", compute_capability=(8, 9), num_sms=128,
            l2_bytes=75497472, memory_clock_khz=10501000, power_limit_w=450,
        ),
        aliases=("RTX 4090", "rtx4090"),
        facts=DeviceFacts(
            sm_clock_mhz=2520, memory_gbytes_per_s=1008, mma_16bit_per_clock=256,
            mma_8bit_per_clock=512, l2_bytes_per_clock=GDDR_L2,
            shared_memory_bytes=100 * 1024,
        ),
        source="NVIDIA Ada GPU Architecture whitepaper, appendix A: 165.2 TFLOPS bf16 and 330.3 "
        "fp8 dense with fp32 accumulation, 1008 GB/s, 72 MiB L2, 450 W",
    ),
    PredictedDevice(
        fingerprint=DeviceFingerprint(
            name="NVIDIA H100 80GB HBM3", compute_capability=(9, 0), num_sms=132,
            l2_bytes=52428800, memory_clock_khz=2619000, power_limit_w=700,
        ),
        aliases=("H100 SXM", "H100", "h100"),
        facts=DeviceFacts(
            sm_clock_mhz=1830, memory_gbytes_per_s=3352, mma_16bit_per_clock=2048,
            mma_8bit_per_clock=4096, l2_bytes_per_clock=DATA_CENTRE_L2,
            shared_memory_bytes=228 * 1024,
        ),
        source="NVIDIA H100 Tensor Core GPU Architecture whitepaper, SXM5: 989.4 TFLOPS bf16 and "
        "1978.9 fp8 dense, 3352 GB/s, 50 MiB L2, 700 W",
    ),
    PredictedDevice(
        fingerprint=DeviceFingerprint(
            name="NVIDIA H100 PCIe", compute_capability=(9, 0), num_sms=114, l2_bytes=52428800,
            memory_clock_khz=1593000, power_limit_w=350,
        ),
        aliases=("H100 PCIe",),
        facts=DeviceFacts(
            sm_clock_mhz=1620, memory_gbytes_per_s=2039, mma_16bit_per_clock=2048,
            mma_8bit_per_clock=4096, l2_bytes_per_clock=DATA_CENTRE_L2,
            shared_memory_bytes=228 * 1024,
        ),
        source="NVIDIA H100 Tensor Core GPU Architecture whitepaper, PCIe: 756 TFLOPS bf16 and "
        "1513 fp8 dense, 2039 GB/s, 50 MiB L2, 350 W",
    ),
    PredictedDevice(
        fingerprint=DeviceFingerprint(
            name="NVIDIA H200", compute_capability=(9, 0), num_sms=132, l2_bytes=62914560,
            memory_clock_khz=3201000, power_limit_w=700,
        ),
        aliases=("H200", "h200"),
        facts=DeviceFacts(
            sm_clock_mhz=1830, memory_gbytes_per_s=4800, mma_16bit_per_clock=2048,
            mma_8bit_per_clock=4096, l2_bytes_per_clock=DATA_CENTRE_L2,
            shared_memory_bytes=228 * 1024,
        ),
        source="fingerprint as measured (tuning_data/nvidia_h200); NVIDIA H200 data sheet: "
        "989 TFLOPS bf16 and 1979 fp8 dense, 4.8 TB/s",
    ),
    PredictedDevice(
        fingerprint=DeviceFingerprint(
            name="NVIDIA B200", compute_capability=(10, 0), num_sms=148, l2_bytes=132644864,
            memory_clock_khz=3996000, power_limit_w=1000,
        ),
        aliases=("B200", "b200"),
        facts=DeviceFacts(
            sm_clock_mhz=1850, memory_gbytes_per_s=7700, mma_16bit_per_clock=4096,
            mma_8bit_per_clock=8192, l2_bytes_per_clock=DATA_CENTRE_L2,
            shared_memory_bytes=228 * 1024,
        ),
        source="NVIDIA HGX B200 data sheet, an eighth of it: 2.25 PFLOPS bf16 and 4.5 fp8 dense, "
        "7.7 TB/s, 1000 W; SMs and L2 as users print them",
    ),
    PredictedDevice(
        fingerprint=DeviceFingerprint(
            name="NVIDIA GeForce RTX 5090", compute_capability=(12, 0), num_sms=170,
            l2_bytes=100663296, memory_clock_khz=14001000, power_limit_w=575,
        ),
        aliases=("RTX 5090", "rtx5090"),
        facts=DeviceFacts(
            sm_clock_mhz=2407, memory_gbytes_per_s=1792, mma_16bit_per_clock=256,
            mma_8bit_per_clock=512, l2_bytes_per_clock=GDDR_L2,
            shared_memory_bytes=100 * 1024,
        ),
        source="NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A: 209.5 TFLOPS bf16 "
        "and 419 fp8 dense with fp32 accumulation, 1792 GB/s, 96 MiB L2, 575 W",
    ),
)
"""Devices for which a table may carry predicted entries, by compute capability and SMs."""


def predict(
    key: Key, device: PredictedDevice, kernels: Iterable[KernelRecord]
) -> list[tuple[Config, float]]:
    """Configs of the kernels that fit, each with its predicted time in µs, fastest first.

    Args:
      key: the problem.
      device: where it would run.
      kernels: any kernels; those of another op, arch, dtype or layout are left out.

    Returns:
      One config a kernel, with the knobs of its launch at their defaults; equal times in the order
      of the configs. Empty if no kernel fits.

    Raises:
      ValueError: a size is not positive, a dtype is unknown, or a kernel's tile, cluster or number
        of stages is none.
    """
    for name in ("m", "n", "k"):
        value = getattr(key, name)
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r} of a problem must be an int >= 1")
    for name in ("a_dtype", "b_dtype", "out_dtype"):
        value = getattr(key, name)
        if value not in ELEMENT_BYTES:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(ELEMENT_BYTES)}")
    capability = device.fingerprint.compute_capability
    times = [
        (Config(backend=kernel.backend, kernel=kernel.id), _time_us(key, device, kernel))
        for kernel in kernels
        if kernel.op == key.op and fits(kernel, key, capability)
    ]
    return sorted(times, key=lambda item: (item[1], item[0]))


def _triton_stages(kernel: KernelRecord) -> int:
    num_stages = kernel.config.get("num_stages", DEFAULT_STAGES)
    if type(num_stages) is not int or num_stages < 1:
        raise ValueError(f"num_stages={num_stages!r} of kernel {kernel.id!r} must be an int >= 1")
    return max(2, num_stages)


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _time_us(key: Key, device: PredictedDevice, kernel: KernelRecord) -> float:
    facts, fingerprint = device.facts, device.fingerprint
    tiling = tiling_of(kernel)
    # A cluster is launched whole, so tiles that it has beyond the problem take an SM each.
    tiles_m = _ceil_div(_ceil_div(key.m, tiling.m), tiling.cluster_m) * tiling.cluster_m
    tiles_n = _ceil_div(_ceil_div(key.n, tiling.n), tiling.cluster_n) * tiling.cluster_n
    num_groups = max(1, key.num_groups)
    num_tiles = num_groups * tiles_m * tiles_n
    num_steps = _ceil_div(key.k, tiling.k)
    a_bytes, b_bytes = ELEMENT_BYTES[key.a_dtype], ELEMENT_BYTES[key.b_dtype]

    stage_bytes = (tiling.m * a_bytes + tiling.n * b_bytes) * tiling.k
    is_cutlass = "schedule" in kernel.config
    is_persistent = kernel.config.get("schedule") in TILE_SCHEDULED
    if is_cutlass:
        # CUTLASS gives a block all of an SM's shared memory, in as many stages as fit.
        num_stages, num_resident = max(2, facts.shared_memory_bytes // stage_bytes), 1
    else:
        num_stages = _triton_stages(kernel)
        num_resident = max(1, facts.shared_memory_bytes // (num_stages * stage_bytes))

    # Past the edge CUTLASS's TMA loads nothing, and Triton's kernels the last row again.
    rows, columns = min(key.m, tiling.m), min(key.n, tiling.n)
    repeated_rows = 0 if is_cutlass else tiling.m - rows + tiling.n - columns
    load_bytes = tiling.k * (
        rows * a_bytes / tiling.cluster_n + columns * b_bytes / tiling.cluster_m
    )
    step_us = (
        max(
            _multiply_clocks(key, facts, tiling),
            stage_bytes / SHARED_MEMORY_BYTES_PER_CLOCK,
            load_bytes / LOAD_PORT_BYTES_PER_CLOCK,
        )
        + repeated_rows * REPEATED_ROW_CLOCKS
    ) / facts.sm_clock_mhz
    lone_step_us = max(step_us, LATENCY_US / (num_stages - 1))

    tiles_per_sm = _ceil_div(num_tiles, fingerprint.num_sms)
    out_bytes = tiling.m * tiling.n * ELEMENT_BYTES[key.out_dtype]
    edge_us = LATENCY_US + out_bytes / LOAD_PORT_BYTES_PER_CLOCK / facts.sm_clock_mhz
    if is_persistent:
        sm_us = edge_us + tiles_per_sm * num_steps * lone_step_us
    else:
        waves = _ceil_div(num_tiles, fingerprint.num_sms * num_resident)
        sm_us = max(
            waves * (edge_us + num_steps * lone_step_us),
            edge_us + tiles_per_sm * num_steps * step_us,
        )
    l2_bytes_per_us = facts.l2_bytes_per_clock * fingerprint.num_sms * facts.sm_clock_mhz
    l2_us = num_tiles * num_steps * load_bytes / l2_bytes_per_us
    dram_bytes_per_us = facts.memory_gbytes_per_s * 1000 * DRAM_EFFICIENCY
    concurrent_tiles = min(num_tiles, fingerprint.num_sms * num_resident)
    a_passes, b_passes = _passes(kernel, tiles_m, tiles_n, concurrent_tiles)
    dram_bytes = num_groups * (
        _read_bytes(key.m * key.k * a_bytes, a_passes, fingerprint)
        + _read_bytes(key.n * key.k * b_bytes, b_passes, fingerprint)
        + key.m * key.n * ELEMENT_BYTES[key.out_dtype]
    )
    dram_us = dram_bytes / dram_bytes_per_us
    return round(LAUNCH_US + max(sm_us, edge_us + l2_us, edge_us + dram_us), 3)


def _multiply_clocks(key: Key, facts: DeviceFacts, tiling: Tiling) -> float:
    """Clocks of one step of one tile in the tensor cores, and in the integer lanes before them."""
    multiply_adds = tiling.m * tiling.n * tiling.k
    is_8_bit = ELEMENT_BYTES[key.a_dtype] == ELEMENT_BYTES[key.b_dtype] == 1
    if not is_8_bit:
        return multiply_adds / (facts.mma_16bit_per_clock * MMA_EFFICIENCY)
    if facts.mma_8bit_per_clock:
        return multiply_adds / (facts.mma_8bit_per_clock * MMA_EFFICIENCY)
    num_elements = (tiling.m + tiling.n) * tiling.k
    return (
        multiply_adds / (facts.mma_16bit_per_clock * MMA_EFFICIENCY)
        + num_elements * WIDENING_OPS / INTEGER_LANES
    )


def _passes(
    kernel: KernelRecord, tiles_m: int, tiles_n: int, concurrent_tiles: int
) -> tuple[int, int]:
    """How often the tiles, in the order in which they run, go over all of a and all of b."""
    if "schedule" not in kernel.config:
        rows = max(GROUP_M, concurrent_tiles // tiles_n)
        return 1, _ceil_div(tiles_m, rows)
    if kernel.config["schedule"] in TILE_SCHEDULED:
        # The scheduler walks along the axis with fewer tiles (sm90_tile_scheduler.hpp, raster order
        # "Heuristic").
        is_along_m = tiles_m < tiles_n
    else:
        # Block x is the kernel's m, which with swapped operands is the user's n.
        is_along_m = not kernel.config.get("swap_ab")
    if is_along_m:
        return _ceil_div(tiles_n, max(1, concurrent_tiles // tiles_m)), 1
    return 1, _ceil_div(tiles_m, max(1, concurrent_tiles // tiles_n))


def _read_bytes(operand_bytes: int, passes: int, fingerprint: DeviceFingerprint) -> int:
    return operand_bytes * (passes if operand_bytes * 2 > fingerprint.l2_bytes else 1)
