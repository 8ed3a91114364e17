"""info: what this installation has and what it finds on this machine."""

from __future__ import annotations

import functools
import importlib.util
import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from stoneware import __version__
from stoneware.errors import DriverError, TableError
from stoneware.explanation import fitted
from stoneware.kernels import cutlass_kernels, manifest
from stoneware.kernels.registry import CALL_MODULE, OPS
from stoneware.runtime import environment, native
from stoneware.runtime.device import DRIVER_MODULE, cuda_device
from stoneware.tuning import sources, table_file
from stoneware.tuning.table import Table

NATIVE_MODULES = (DRIVER_MODULE, CALL_MODULE, cutlass_kernels.MODULE)


@dataclass(frozen=True, kw_only=True)
class Info:
    """What `info` found; `print` it, or take `as_dict()`. A part that fails holds the failure.

    Attributes:
      stoneware, python, torch: versions; torch is with its CUDA, or "not installed".
      driver: version of the CUDA driver as "13.0", or why there is none.
      devices: each GPU in words.
      modules: native module -> "found", or why not.
      kernel_set: how many kernels this installation has, of how many.
      kernels: "op backend arch" -> how many kernels.
      tables: op -> digest, with the number of entries by device; and, as "op (source)", those of
        the user's store and of installed packages.
      store: the file of the user's samples, how many it has, and what is wrong with it.
      mode: what STONEWARE_TUNING says, or why it says nothing.
      batch_invariant: the same of STONEWARE_BATCH_INVARIANT.
    """

    stoneware: str
    python: str
    torch: str
    driver: str
    devices: tuple[str, ...]
    modules: dict[str, str]
    kernel_set: str
    kernels: dict[str, int | str]
    tables: dict[str, str]
    store: str
    mode: str
    batch_invariant: str

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for `json.dumps`."""
        return {**asdict(self), "devices": list(self.devices)}

    def __str__(self) -> str:
        gpus = {f"gpu {ordinal}": device for ordinal, device in enumerate(self.devices)}
        versions = {name: getattr(self, name) for name in ("stoneware", "python", "torch", "driver")}
        versions["kernel set"] = self.kernel_set
        lines = [line for name, value in {**versions, **gpus}.items() for line in fitted(name, value, 11)]
        for title, section in (("modules", self.modules), ("kernels", self.kernels), ("tables", self.tables)):
            width = max(map(len, section), default=0) + 4
            lines.append(title)
            lines += [line for name, value in section.items() for line in fitted(f"  {name}", str(value), width)]
        last = {"store": self.store, "tuning": self.mode, "batch invariant": self.batch_invariant}
        return "\n".join([*lines, *(line for name, value in last.items() for line in fitted(name, value, 17))])


def info() -> Info:
    """Reports versions, devices, native modules, kernels and tables; never raises for a part that
    is missing, broken or damaged, whatever the part raises, but says so in its place."""
    driver, devices = _driver()
    return Info(
        stoneware=__version__,
        python=platform.python_version(),
        torch=_torch(),
        driver=driver,
        devices=devices,
        modules={name: native.why_missing(name) or "found" for name in NATIVE_MODULES},
        kernel_set=_kernel_set(),
        kernels=_kernels(),
        tables=_tables(),
        store=_store(),
        mode=_from_environment(environment.tuning_mode),
        batch_invariant=_from_environment(lambda: "on" if environment.batch_invariant() else "off"),
    )


def _torch() -> str:
    try:
        if importlib.util.find_spec("torch") is None:
            return "not installed"
        import torch

        return f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"
    except Exception as error:
        return f"not usable: {type(error).__name__}: {error}"


def _driver() -> tuple[str, tuple[str, ...]]:
    if reason := native.why_missing(DRIVER_MODULE):
        return reason, ()
    try:
        module = native.load(DRIVER_MODULE)
        version = ".".join(map(str, module.driver_version()))
        ordinals = range(module.device_count())
        return version, tuple(str(cuda_device(ordinal)) for ordinal in ordinals)
    except DriverError as error:
        return str(error), ()
    except Exception as error:
        return f"{DRIVER_MODULE} is not usable: {type(error).__name__}: {error}", ()


def _kernel_set() -> str:
    try:
        found = manifest.packaged()
    except Exception as error:
        return _failure(error)
    built = len(found.kernels)
    if not found.left_out:
        return f"all ({built} kernels)"
    return f"small ({built} of {built + len(found.left_out)} kernels)"


def _kernels() -> dict[str, int | str]:
    try:
        records = manifest.packaged().kernels.values()
    except TableError as error:
        return {"none": str(error)}
    except Exception as error:
        return {"none": f"{type(error).__name__}: {error}"}
    count = Counter(f"{record.op} {record.backend} {record.arch}" for record in records)
    return dict(sorted(count.items()))


def _tables() -> dict[str, str]:
    tables = {op: _table(functools.partial(table_file.packaged, op)) for op in OPS}
    for op in OPS:
        try:
            others = [one for one in sources.sources(op) if one.name != sources.WHEEL]
        except Exception as error:
            if str(error) not in tables[op]:
                tables[f"{op} (others)"] = _failure(error)
            continue
        for one in others:
            tables[f"{op} ({one.name})"] = _table(functools.partial(getattr, one, "table"))
    return tables


def _table(get: Callable[[], Table | None]) -> str:
    try:
        found = get()
    except Exception as error:
        return _failure(error)
    if found is None:
        return "none"
    entries = ", ".join(f"{device.num_entries} entries of {device.fingerprint.name}" for device in found.devices)
    return f"{found.digest} ({entries or 'no entries'})"


def _failure(error: Exception) -> str:
    return str(error) if isinstance(error, TableError) else f"{type(error).__name__}: {error}"


def _store() -> str:
    try:
        from stoneware.tuning.store import user_store

        store = user_store()
        if store is None:
            return "none: there is no home for one; set STONEWARE_CACHE_DIR"
        problems = store.problems()
        wrong = f"; {len(problems)} problems, the first: {problems[0]}" if problems else ""
        return f"{store.path} ({len(store.samples())} samples{wrong})"
    except Exception as error:
        return _failure(error)


def _from_environment(read: Callable[[], str]) -> str:
    try:
        return read()
    except ValueError as error:
        return str(error)
