"""info: the parts of this installation, and the GPUs and the store of this machine."""

from __future__ import annotations

import importlib.util
import platform
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from stoneware import __version__
from stoneware.errors import StonewareError
from stoneware.explanation import fitted
from stoneware.kernels import manifest, sm90_kernels
from stoneware.kernels.built_matmuls import FLAG
from stoneware.runtime import environment, native
from stoneware.runtime.device import DRIVER_MODULE, cuda_device
from stoneware.runtime.native import CALL_MODULE
from stoneware.specs import OPS
from stoneware.tuning import sources, table_file
from stoneware.tuning.table import Table

NATIVE_MODULES = (DRIVER_MODULE, CALL_MODULE, sm90_kernels.MODULE)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Info:
    """The result of `info`; `print` it, or use `as_dict()`. A part that fails contains the failure.

    Attributes:
      stoneware, python, torch: versions; torch includes its CUDA version, or is "not installed".
      driver: version of the CUDA driver, such as "13.0", or why it is missing.
      devices: each GPU in words.
      modules: native module -> "found", or why not.
      kernel_set: the number of kernels in this installation, and in the full set.
      backward: whether this installation has gradients; if not, the number of kernels left out.
      kernels: "op backend arch" -> number of kernels.
      tables: op -> digest, with the number of entries by device; and, as "op (source)", those of
        the user's store and of installed packages.
      store: the file of the user's samples, how many it has, and what is wrong with it.
      mode: the tuning mode that STONEWARE_TUNING sets, or what is wrong with it.
      batch_invariant: "on" or "off", as STONEWARE_BATCH_INVARIANT sets it, or what is wrong with it.
    """

    stoneware: str
    python: str
    torch: str
    driver: str
    devices: tuple[str, ...]
    modules: dict[str, str]
    kernel_set: str
    backward: str
    kernels: Mapping[str, int | str]
    tables: dict[str, str]
    store: str
    mode: str
    batch_invariant: str

    def as_dict(self) -> dict[str, Any]:
        """The parts in plain values, for `json.dumps`."""
        return {**asdict(self), "devices": list(self.devices)}

    def __str__(self) -> str:
        gpus = {f"gpu {ordinal}": device for ordinal, device in enumerate(self.devices)}
        versions = {name: getattr(self, name) for name in ("stoneware", "python", "torch", "driver")}
        versions |= {"kernel set": self.kernel_set, "backward": self.backward}
        lines = [line for name, value in {**versions, **gpus}.items() for line in fitted(name, value, 11)]
        for title, section in (("modules", self.modules), ("kernels", self.kernels), ("tables", self.tables)):
            width = max(map(len, section), default=0) + 4
            lines.append(title)
            lines += [line for name, value in section.items() for line in fitted(f"  {name}", str(value), width)]
        last = {"store": self.store, "tuning": self.mode, "batch invariant": self.batch_invariant}
        return "\n".join([*lines, *(line for name, value in last.items() for line in fitted(name, value, 17))])


def info() -> Info:
    """Reports versions, devices, native modules, kernels and tables; a missing, broken or
    damaged part never raises, but is reported as the value of that part."""
    kernels, gpus = _part(_kernels), _part(_driver)
    driver, devices = (gpus, ()) if isinstance(gpus, str) else gpus
    return Info(
        stoneware=__version__,
        python=platform.python_version(),
        torch=_part(_torch),
        driver=driver,
        devices=devices,
        modules={name: native.why_missing(name) or "found" for name in NATIVE_MODULES},
        kernel_set=_part(_kernel_set),
        backward=_part(_backward),
        kernels={"none": kernels} if isinstance(kernels, str) else kernels,
        tables=_tables(),
        store=_part(_store),
        mode=_part(environment.tuning_mode),
        batch_invariant=_part(lambda: "on" if environment.batch_invariant() else "off"),
    )


def _part(get: Callable[..., T], *arguments: object) -> T | str:
    """The result of `get`, or the reason why it fails."""
    try:
        return get(*arguments)
    except (StonewareError, ValueError) as error:
        return str(error)
    except Exception as error:
        return f"not usable: {type(error).__name__}: {error}"


def _torch() -> str:
    if importlib.util.find_spec("torch") is None:
        return "not installed"
    import torch

    return f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"


def _driver() -> tuple[str, tuple[str, ...]]:
    """The driver's version, and each GPU."""
    module = native.load(DRIVER_MODULE)
    version = ".".join(map(str, module.driver_version()))
    return version, tuple(str(cuda_device(ordinal)) for ordinal in range(module.device_count()))


def _kernel_set() -> str:
    kernels = manifest.packaged()
    num_kernels, num_left_out = len(kernels.kernels), len(kernels.left_out)
    if not num_left_out:
        return f"all ({num_kernels} kernels)"
    return f"small ({num_kernels} of {num_kernels + num_left_out} kernels)"


def _backward() -> str:
    kernels = manifest.packaged()
    removed = f"{len(kernels.removed)} kernels of gradients are not built"
    if not kernels.has_backward:
        return f"off: forward only, {removed} ({FLAG}=false)"
    return f"on, but {removed}" if kernels.removed else "on"


def _kernels() -> dict[str, int]:
    records = manifest.packaged().kernels.values()
    count = Counter(f"{record.op} {record.backend} {record.arch}" for record in records)
    return dict(sorted(count.items()))


def _tables() -> dict[str, str]:
    tables = {op: _part(lambda op: _table(table_file.packaged(op)), op) for op in OPS}
    for op in OPS:
        searched = _part(sources.sources, op)
        if not isinstance(searched, str):  # otherwise another part has the reason
            others = [source for source in searched if source.name != sources.WHEEL]
            tables |= {f"{op} ({source.name})": _part(_table, source.table) for source in others}
    return tables


def _table(table: Table | None) -> str:
    if table is None:
        return "none"
    entries = ", ".join(f"{device.num_entries} entries of {device.fingerprint.name}" for device in table.devices)
    return f"{table.digest} ({entries or 'no entries'})"


def _store() -> str:
    from stoneware.tuning.store import user_store

    store = user_store()
    if store is None:
        return "none: this user has no home folder; set STONEWARE_CACHE_DIR"
    problems = store.problems()
    wrong = f"; {len(problems)} problems, the first: {problems[0]}" if problems else ""
    return f"{store.path} ({len(store.samples())} samples{wrong})"
