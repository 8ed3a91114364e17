"""A tuning session on a GPU that is not there, with fake_child.py as the measuring process."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import h200
from h200 import H200

from stoneware.kernels.config import Config
from stoneware.measuring.progress import Reporter
from stoneware.measuring.settings import Settings
from stoneware.runtime.device import Device, DeviceFingerprint
from stoneware.sessions.session import Session
from stoneware.specs.scaled_mm_problem import Problem
from stoneware.tuning.store import Store

H100 = dataclasses.replace(H200, name="NVIDIA H100", l2_bytes=52428800)
VENDOR = Config(backend="vendor", kernel="ok_20.0")
DEFAULT = Config(backend="sm90", kernel="ok_15.0")
PATIENT = Settings(hang_limit_s=60.0)
QUICK = Settings(hang_limit_s=1.5)
"""For candidates that hang; a busy machine may stop any other for a while."""


def config(kernel: str) -> Config:
    return Config(backend="triton_aot", kernel=kernel)


def problems(*m_values: int) -> list[Problem]:
    return [Problem.dense(m=m, n=4096, k=4096) for m in m_values]


@dataclasses.dataclass
class Bench:
    """A folder with a store and the log of the measuring processes."""

    folder: Path
    device: DeviceFingerprint = H200
    digest: str = ""

    @property
    def store(self) -> Store:
        return Store(self.folder / "samples.sqlite3")

    @property
    def log(self) -> Path:
        return self.folder / "measured.log"

    @property
    def measured(self) -> Counter[str]:
        """How often each "<m> <kernel>" ran for the first time in a process."""
        return Counter(self.log.read_text().splitlines()) if self.log.exists() else Counter()

    @property
    def samples(self) -> dict[tuple[int, str], str]:
        """(m, kernel) -> status of what is stored; fails if there are two of one."""
        pairs = [((sample.key.m, sample.config.kernel), sample.status) for _, sample in self.store.samples()]
        assert len(dict(pairs)) == len(pairs), f"stored twice: {pairs}"
        return dict(pairs)

    def session(
        self,
        kernels: Sequence[str] = (),
        *,
        run: str = "run-1",
        settings: Settings | None = None,
        reporter: Reporter | None = None,
        has_default: bool = True,
        store: Store | None = None,
    ) -> Session:
        always = [DEFAULT, VENDOR] if has_default else []
        record = h200.run(run, self.device)
        may_hang = any(kernel.startswith("hang") for kernel in kernels)
        settings = settings or (QUICK if may_hang else PATIENT)
        return Session(
            store=store or self.store,
            run=record,
            settings=settings,
            reporter=reporter or Reporter(),
            device=Device(ordinal=0, fingerprint=self.device),
            command=[sys.executable, str(Path(__file__).with_name("fake_child.py")), str(self.log)],
            candidates_of=lambda problem: (always, list(map(config, kernels))),
            end_run=lambda: dataclasses.replace(record, sm_clock_mhz_after=1965),
            digest=lambda config: self.digest,
        )
