"""From a problem to a plan: asks the backends, the table and the rule of thumb, and makes the plan.

Runs on a miss of an op's plan cache, and in `explain`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stoneware.autotune import lookup, table
from stoneware.autotune.config import Config
from stoneware.autotune.key import Key
from stoneware.autotune.lookup import Decision, Refusal
from stoneware.ops.backend import Backend
from stoneware.runtime import manifest
from stoneware.runtime.device import Device
from stoneware.runtime.manifest import Manifest

REFERENCE = "reference"

_LOG = logging.getLogger("stoneware")


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An op and its backends.

    Attributes:
      name: such as "scaled_mm".
      backends: by name, in the order in which the default layer asks them. The last is the
        reference, which runs anywhere and on a GPU is the last resort.
      preferred: the rule of thumb: configs by key, compute capability and manifest, best first.
      preferred_reason: that rule as a sentence.
    """

    name: str
    backends: Mapping[str, Backend]
    preferred: Callable[[Key, tuple[int, int], Manifest], list[Config]]
    preferred_reason: str

    def candidates(self, problem: Any, device: Device) -> list[Config]:
        """Every config that can run the problem; the reference's only if there is no other."""
        defaults = self._defaults(problem, device)[0]
        others = [config for config in defaults if config.backend != REFERENCE]
        return others or defaults

    def decide(
        self, problem: Any, device: Device, *, backend: str | None = None,
        config: Config | None = None,
    ) -> Decision:
        """Chooses the config; see `lookup.decide` for the order.

        Args:
          problem: what to run.
          device: where.
          backend: take configs of this backend only.
          config: take this config.

        Raises:
          TypeError, ValueError: `backend` or `config` is not one.
          UnsupportedError: nothing can run the problem; every refusal is listed.
          TableError: the table or the manifest is damaged.
        """
        self.check_argument(backend, config)
        defaults, refused = self._defaults(problem, device, backend)
        has_kernels = device.kind == "cuda"

        def refusal(candidate: Config) -> str | None:
            if backend is not None and candidate.backend != backend:
                return f"backend={backend!r} was asked for"
            return self._refusal(problem, candidate, device)

        return lookup.decide(
            problem.key,
            device,
            argument=config,
            table=table.packaged(self.name) if has_kernels and config is None else None,
            heuristic=(
                self.preferred(problem.key, device.compute_capability, manifest.packaged())
                if has_kernels and config is None else ()
            ),
            heuristic_reason=self.preferred_reason,
            defaults=defaults,
            refusal=refusal,
            refused_backends=refused,
            backend=backend,
        )

    def plan(
        self, problem: Any, device: Device, *, backend: str | None = None,
        config: Config | None = None,
    ) -> Callable[..., None]:
        """Decides, and makes the plan; arguments and errors as in `decide`."""
        decision = self.decide(problem, device, backend=backend, config=config)
        if decision.config.backend == REFERENCE and backend is None and config is None:
            _say_reference(self.name, device, decision)
        return self.backends[decision.config.backend].plan(problem, decision.config, device)

    def make_plan(self, problem: Any, config: Config, device: Device) -> Callable[..., None]:
        """The plan of one config, for tuners; raises UnsupportedError if it cannot run here."""
        return self.plan(problem, device, config=config)

    def _defaults(
        self, problem: Any, device: Device, backend: str | None = None
    ) -> tuple[list[Config], list[Refusal]]:
        configs: list[Config] = []
        refused = []
        for name, module in self.backends.items():
            if backend is not None and name != backend:
                continue
            reason = module.supports(problem, device)
            if reason is None:
                configs += module.configs(problem, device)
            else:
                refused.append(Refusal(what=name, reason=reason))
        return configs, refused

    def _refusal(self, problem: Any, config: Config, device: Device) -> str | None:
        """Why a config of a known or unknown backend cannot run the problem; None if it can."""
        module = self.backends.get(config.backend)
        if module is None:
            return f"{self.name} has no backend {config.backend!r}; it has {list(self.backends)}"
        reason = module.supports(problem, device)
        if reason is not None:
            return reason
        kernels = sorted({known.kernel for known in module.configs(problem, device)})
        if config.kernel not in kernels:
            return (
                f"kernel {config.kernel!r} is not one of those that {config.backend} has for this "
                f"problem: {', '.join(kernels)}"
            )
        return None

    def check_argument(self, backend: str | None, config: Config | None) -> None:
        """Raises TypeError or ValueError unless both are what the call takes."""
        known = f"one of {', '.join(self.backends)}, or leave it out"
        if backend is not None and not isinstance(backend, str):
            raise TypeError(
                f"backend={backend!r} must be a str, not {type(backend).__name__}; pass {known}"
            )
        if backend is not None and backend not in self.backends:
            raise ValueError(
                f"backend={backend!r} is no backend of {self.name} and must be {known}"
            )
        if config is None:
            return
        if not isinstance(config, Config):
            raise TypeError(
                f"config={config!r} must be a stoneware.autotune.config.Config, "
                f"not {type(config).__name__}; take stoneware.explain(...).config, or leave it out"
            )
        if backend is not None and config.backend != backend:
            raise ValueError(
                f"backend={backend!r} and config.backend={config.backend!r} must agree; "
                "leave backend out"
            )


_said_reference: set[str] = set()
"""Kinds of device of which it was said that the reference runs."""


def _say_reference(op: str, device: Device, decision: Decision) -> None:
    """Says once per process and kind of device that nothing faster runs, and why."""
    if device.kind in _said_reference:
        return
    _said_reference.add(device.kind)
    _LOG.warning(
        "%s runs on %s with the reference backend, plain torch and slow, because no other can: %s",
        op, device, "; ".join(map(str, decision.refusals)),
    )
