"""One training run of `layers --parts train`, in a process of its own, so that it can be killed.

    python -m tools.gpu_check.layers_train_run --recipe rowwise --steps 1000 --out FILE [--checkpoint FILE]

The model is examples/llama_model.py's, in float32 under torch.autocast to bf16. The text is the sources
of Python's standard library, as bytes: they are on every machine, though not the same ones for each
version of Python. Algorithms are deterministic, and the batch of a step depends on its number alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import signal
import sys
import sysconfig
from collections.abc import Mapping
from typing import Any

import torch

import stoneware as sw
from tools.gpu_check.layers_sizes import BY_NAME, Sizes

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
from llama_model import Llama, loss_of

RECIPES = ("torch", "rowwise", "blockwise")

_NOT_TEXT = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_LEARNING_RATE, _WARM_UP_STEPS = 3e-4, 100


def text() -> torch.Tensor:
    """The sources of the standard library, one after another, as bytes."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in folder.rglob("*.py") if not _NOT_TEXT & set(path.relative_to(folder).parts)]
    joined = b"\n".join(path.read_bytes() for path in sorted(files))
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)


def text_facts(data: torch.Tensor) -> dict[str, Any]:
    """Which text it is."""
    digest = hashlib.sha256(data.numpy().tobytes()).hexdigest()
    return {"text": "sources of Python's standard library", "num_bytes": len(data), "sha256": digest}


def be_deterministic() -> None:
    """Without warn_only, with which torch's attention keeps adding its gradients in any order
    (aten/src/ATen/native/transformers/cuda/attention_backward.cu)."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it is not read, and filling takes time


class Training:
    """A model, its optimizer and the steps so far.

    Args:
      recipe: of `sw.nn.convert`, or "torch" for torch.nn.Linear in bf16.
      sizes: of the model and its batches.
      device: where it runs.
    """

    def __init__(self, recipe: str, sizes: Sizes, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = Llama(**sizes.train_model).to(device)
        if recipe != RECIPES[0]:
            sw.nn.convert(self.model, recipe)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE, fused=True)
        self._sizes, self._device = sizes, device

    @property
    def num_parameters(self) -> int:
        return sum(one.numel() for one in self.model.parameters())

    def step(self, data: torch.Tensor, step_idx: int) -> torch.Tensor:
        """Trains on the batch of this step; returns its loss, on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1.0, (step_idx + 1) / _WARM_UP_STEPS)
        with torch.autocast(self._device.type, torch.bfloat16):
            loss = loss_of(self.model, data, step_idx, self._sizes.train_batch, self._sizes.train_model["length"])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def save(self, path: pathlib.Path, losses: list[float]) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "losses": losses}
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: pathlib.Path) -> list[float]:
        """The losses up to the checkpoint."""
        state: Mapping[str, Any] = torch.load(path, map_location=self._device)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return list(state["losses"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", required=True, choices=RECIPES)
    parser.add_argument("--sizes", required=True, choices=list(BY_NAME))
    parser.add_argument("--device", required=True, choices=["cuda", "cpu"])
    parser.add_argument("--steps", required=True, type=int)
    parser.add_argument("--out", required=True, type=pathlib.Path, help="where the losses go")
    parser.add_argument("--checkpoint", type=pathlib.Path, help="read if it is there; written at half of the steps")
    parser.add_argument("--kill_at", type=int, default=-1, help="the step before which the process kills itself")
    options = parser.parse_args(arguments)
    be_deterministic()
    training = Training(options.recipe, BY_NAME[options.sizes], torch.device(options.device))
    data = text()
    losses: list[float] = []
    if options.checkpoint and options.checkpoint.exists():
        losses = training.load(options.checkpoint)
    first = len(losses)
    on_device: list[torch.Tensor] = []
    for step_idx in range(first, options.steps):
        if step_idx == options.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        on_device.append(training.step(data, step_idx))
        if options.checkpoint and step_idx + 1 == options.steps // 2:
            training.save(options.checkpoint, losses + torch.stack(on_device).tolist())
    if on_device:
        losses += torch.stack(on_device).tolist()
    result = {"losses": losses, "first_step": first, "parameters": training.num_parameters, **text_facts(data)}
    options.out.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
