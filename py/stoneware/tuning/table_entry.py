"""What a tuning table holds: the candidates at a problem, timed and in order, and their models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from stoneware.kernels.config import AnyConfig
from stoneware.kernels.key import AnyKey
from stoneware.runtime.device import DeviceFingerprint
from stoneware.runtime.fast_dataclass import dataclass
from stoneware.tuning.time_model import TimeModel

PREDICTED_RUN = "predicted"
"""Stands for the run of a choice whose time was computed and not measured."""

MODELLED_RUN = "modelled"
"""The same where it was computed from measurements at other problems, by a look-up."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A candidate at a shape, with its measurement.

    Attributes:
      config: the candidate.
      median_us, spread_us: median and interquartile range; 0 for the spread of what was computed.
      run: id of the run that measured it; PREDICTED_RUN or MODELLED_RUN if none did.
      is_drifted: whether the kernel has other bytes now than when it was measured.
      kernel_sha256: digest of a decorated kernel's source as it was measured; empty for our ops.
    """

    config: AnyConfig
    median_us: float
    spread_us: float
    run: str
    is_drifted: bool = False
    kernel_sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The candidates at one shape.

    Attributes:
      key: the shape and its family.
      choices: the chosen candidate first, then the runners-up from fast to slow.
      rule: why the first was chosen.
      measured_out_dtype: differs from the key's where the other 16-bit output was measured; empty
        for a decorated kernel.
      kernel_sha256: as of the choices.
    """

    key: AnyKey
    choices: tuple[Choice, ...]
    rule: str
    measured_out_dtype: str = ""
    kernel_sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class DeviceEntries:
    """What `encode` writes of one device.

    Attributes:
      fingerprint, aliases: the device.
      is_predicted: whether nothing was measured there.
      entries: in any order; of several with one key (a kernel measured with several sources) the
        first is the one that a look-up falls back on.
      models: family -> config -> model; those that were measured too seldom have none.
      fitted_by: of families whose models are those of another table, its digest.
    """

    fingerprint: DeviceFingerprint
    aliases: tuple[str, ...] = ()
    is_predicted: bool = False
    entries: Sequence[Entry] = ()
    models: Mapping[AnyKey, Mapping[AnyConfig, TimeModel]] = field(default_factory=dict)
    fitted_by: Mapping[AnyKey, str] = field(default_factory=dict)
