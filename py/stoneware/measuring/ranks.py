"""Which of the processes that torchrun started this one is."""

from __future__ import annotations

import dataclasses
import os


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those that torchrun started.

    Attributes:
      rank: of this process, from 0.
      world_size: how many there are.
      local_rank: among those of this machine; the GPU to use.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size or self.local_rank < 0:
            raise ValueError(
                f"RANK={self.rank} must be at least 0 and below WORLD_SIZE={self.world_size}, and "
                f"LOCAL_RANK={self.local_rank} at least 0; start with torchrun, or unset all three"
            )

    @classmethod
    def from_environment(cls) -> Ranks:
        """From torchrun's RANK, WORLD_SIZE and LOCAL_RANK; without them the only process.

        Raises:
          ValueError: one is no number, or they do not fit together.
        """
        values = {}
        for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)):
            text = os.environ.get(name, "") or str(default)
            if not text.isdecimal():
                raise ValueError(
                    f"{name}={text!r} must be a number, as torchrun sets it; unset it"
                )
            values[name.lower()] = int(text)
        return cls(**values)
