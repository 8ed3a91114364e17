"""Backend of the kernels for Hopper, by CUTLASS or in PTX, embedded in the native module; an op refines it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from stoneware.kernels import manifest, sm90_kernels, split_k, tile_rule
from stoneware.kernels.config import Config
from stoneware.kernels.manifest import KernelRecord
from stoneware.kernels.sm90_kernels import COMPUTE_CAPABILITY, MAX_EXTENT
from stoneware.ops.backend import Backend, Plan
from stoneware.runtime import native
from stoneware.runtime.device import Device
from stoneware.specs.op_spec import OpSpec


class Sm90(Backend):
    """The op's kernels for Hopper.

    Attributes:
      max_extents: size -> its limit in the kernels.
    """

    name = sm90_kernels.BACKEND
    max_extents: ClassVar[Mapping[str, int]] = {"m": MAX_EXTENT, "n": MAX_EXTENT}

    def __init__(self, spec: OpSpec) -> None:
        self.spec = spec

    def supports(self, problem: Any, device: Device) -> str | None:
        reason = sm90_kernels.why_unusable(device)
        if reason is not None:
            return reason
        kernels = self._built(problem)
        if not kernels:
            return (
                f"this build has no kernel {problem.a_dtype}*{problem.b_dtype}->{problem.out_dtype}{self.kind(problem)}"
            )
        for name, most in self.max_extents.items():
            if getattr(problem, name) > most:
                return (
                    f"{name}={getattr(problem, name)} must be at most {most} for {self.name}, "
                    "whose tiles count in 32 bits; split the problem"
                )
        return self.refusal(problem, kernels)

    def configs(self, problem: Any, device: Device) -> list[Config]:
        """Each kernel that fits, best tile for m first, with each number of splits that may be the fastest;
        then the kernels of `swizzled`, with each larger swizzle that changes the order of their tiles."""
        configs = tile_rule.by_tile_m(
            problem.key,
            device.compute_capability,
            [kernel for kernel in sm90_kernels.kernels(self.spec.name) if self.fits(problem, kernel)],
        )
        assert device.fingerprint is not None  # a GPU has one, and `supports` refused other devices
        m, n, k, num_sms = problem.m, problem.n, problem.k, device.fingerprint.num_sms
        kernels = [manifest.packaged().kernels[config.kernel] for config in configs]
        return [
            *(
                Config.of_kernel(self.name, kernel.id, splits=splits)
                for kernel in kernels
                for splits in split_k.splits_to_time(kernel, m, n, k, num_sms)
            ),
            *(config for kernel in self.swizzled(kernels) for config in sm90_kernels.swizzled(kernel, m, n)),
        ]

    def runs(self, problem: Any, kernel: KernelRecord) -> bool:
        return tile_rule.fits(kernel, problem.key, COMPUTE_CAPABILITY) and self.fits(problem, kernel)

    def plan(self, problem: Any, config: Config, device: Device) -> Plan:
        sm90_kernels.check_image(config.kernel)
        assert device.ordinal is not None  # a GPU of this machine has one
        return native.plan(self.launch(problem, config, device, config.kernel), device.ordinal)

    def launch(self, problem: Any, config: Config, device: Device, kernel: Any, **epilogue: Any) -> Any:
        """The native module's Plan.

        Args:
          problem, config, device: as for `plan`.
          kernel: id of the config's kernel, or its native LinkedKernel.
          epilogue: of the latter, further arguments of the native Plan.
        """
        ordinal, fingerprint = device.ordinal, device.fingerprint
        assert ordinal is not None and fingerprint is not None  # a GPU of this machine has both
        return native.load(sm90_kernels.MODULE).Plan(
            kernel,
            tensors=self.spec.plan_order,
            m=problem.m,
            n=problem.n,
            k=problem.k,
            lda=problem.lda,
            ldb=problem.ldb,
            ldd=problem.ldd,
            device=ordinal,
            num_sms=fingerprint.num_sms,
            max_swizzle=config.max_swizzle,
            raster=config.raster,
            splits=config.splits,
            **self.fields(problem),
            **epilogue,
        )

    def kind(self, problem: Any) -> str:
        """Further properties that a kernel must be built for; used in the message that no kernel has them."""
        return ""

    def refusal(self, problem: Any, kernels: Sequence[KernelRecord]) -> str | None:
        """Why none of these kernels of the problem's key can run it, or None."""
        return None

    def fits(self, problem: Any, kernel: KernelRecord) -> bool:
        """Whether the grid of a kernel of the problem's key is large enough."""
        return True

    def swizzled(self, kernels: Sequence[KernelRecord]) -> Sequence[KernelRecord]:
        """The kernels that are also candidates with a swizzle, of the problem's kernels, best tile first."""
        return ()

    def fields(self, problem: Any) -> dict[str, Any]:
        """Further arguments of the native plan."""
        return {}

    def _built(self, problem: Any) -> list[KernelRecord]:
        key = problem.key
        return [
            kernel for kernel in sm90_kernels.kernels(self.spec.name) if tile_rule.fits(kernel, key, COMPUTE_CAPABILITY)
        ]
