"""Candidates: what a time belongs to. A table's models and estimates name candidates, samples and calls configs.

A time belongs to a tile at its byte widths, not to a kernel: that of bf16 takes as long as that of fp16,
and the same kernel applies scales of rows or of a tensor. So the candidate of a config of ours is a Config
whose kernel is the tile's name. The vendor library has other kernels for each kind of scales, so its
candidate names these: "torch._scaled_mm:row". When a plan is made, `Configs` gives the config of a candidate
for the dtypes and scales of the call.

Free of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoneware.kernels.config import BACKENDS_WITHOUT_KERNELS, AnyConfig, Config
from stoneware.kernels.key import unchecked
from stoneware.kernels.manifest import tile_of

if TYPE_CHECKING:
    from stoneware.kernels.key import AnyKey, Key
    from stoneware.kernels.manifest import Manifest


def candidate_of(config: AnyConfig, key: AnyKey) -> AnyConfig:
    """What the time of a config that was measured at a key belongs to; of a decorated kernel the config."""
    if not isinstance(config, Config):
        return config
    if config.backend not in BACKENDS_WITHOUT_KERNELS:
        return _with_kernel(config, tile_of(config.kernel))
    return _with_kernel(config, f"{config.kernel}:{key.scales}") if key.scales in ("row", "tensor") else config


def _with_kernel(config: Config, kernel: str) -> Config:
    return unchecked(Config, {**config.__dict__, "kernel": kernel})


class Configs(dict[AnyConfig, "AnyConfig | None"]):
    """Candidate -> its config for calls like `key`; None if it has no kernel for them.

    Args:
      key: of such a call, whatever its sizes.
      kernels: of this build.
      excludes_split_k: leave out configs that split k, as a batch-invariant call does.
      only_open: leave out all but open kernels, as a call with an epilogue does.
    """

    def __init__(self, key: Key, kernels: Manifest, *, excludes_split_k: bool, only_open: bool) -> None:
        super().__init__()
        self._key, self._kernels, self._excludes_split_k = key, kernels, excludes_split_k
        self._only_open = only_open
        self._raced: dict[Key, bool] = {}

    def __missing__(self, candidate: Config) -> Config | None:
        config = self[candidate] = self._config(candidate)
        return config

    def _config(self, candidate: Config) -> Config | None:
        if candidate.splits != 1 and self._excludes_split_k:
            return None
        if candidate.backend in BACKENDS_WITHOUT_KERNELS:
            if self._only_open:
                return None
            name, _, scales = candidate.kernel.partition(":")
            return _with_kernel(candidate, name) if scales in ("", self._key.scales) else None
        for kernel in self._kernels.with_tile(self._key.op, candidate.backend, candidate.kernel):
            if kernel.dtypes == self._key.dtypes and (not self._only_open or kernel.id in self._kernels.open):
                return _with_kernel(candidate, kernel.id)
        return None

    def were_raced(self, kind: Key) -> bool:
        """Whether a race of another kind of the family had every tile that these dtypes have: matmul has tiles
        for bf16 alone, so a race in fp16 decides nothing for bf16."""
        if kind not in self._raced:
            self._raced[kind] = self._tiles_of(self._key.dtypes) <= self._tiles_of(kind.dtypes)
        return self._raced[kind]

    def _tiles_of(self, dtypes: tuple[str, str, str]) -> set[str]:
        kernels = self._kernels.of_op(self._key.op).values()
        return {tile_of(kernel.id) for kernel in kernels if kernel.dtypes == dtypes}


def configs(key: Key, kernels: Manifest, *, excludes_split_k: bool = False, only_open: bool = False) -> Configs:
    """The Configs of calls like `key`, kept with the manifest."""
    question = key.op, key.dtypes, key.scales, excludes_split_k, only_open
    if question not in kernels.configs:
        kernels.configs[question] = Configs(key, kernels, excludes_split_k=excludes_split_k, only_open=only_open)
    return kernels.configs[question]
