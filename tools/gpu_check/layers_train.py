"""The part `train`: losses of fp8 against bf16, a run that is killed and resumed, and the time of a step.

    python -m tools.gpu_check.layers_train --recipe rowwise --steps 1000 --out FILE [--checkpoint FILE]

trains once, in a process of its own, so that it can be killed. The model is that of examples/llama_model.py, in float32
under torch.autocast to bf16. The text is the sources of Python's standard library, as bytes: they are on every machine,
though not the same ones for each version of Python. Algorithms are deterministic, and the batch of a step depends on
its number alone.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import itertools
import json
import math
import os
import pathlib
import signal
import statistics
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import stoneware as sw
from tools.gpu_check import processes
from tools.gpu_check.checks import failures
from tools.gpu_check.experiment import Call, Deadline, Part
from tools.gpu_check.layers_clock import Clock, timing
from tools.gpu_check.layers_sizes import BY_NAME, Sizes
from tools.gpu_check.processes import ProcessFailed

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
from llama_model import Llama, loss_of

RECIPES = ("torch", "rowwise", "blockwise")

_NOT_TEXT = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_LEARNING_RATE, _WARM_UP_STEPS = 3e-4, 100

LOSS_LIMIT = 0.01
"""Relative difference of the last losses' mean from bf16's."""

KILLED = "rowwise, killed and resumed"

AGAIN = "torch, again"
"""A second run of torch's own layers: if its losses also differ, the others' may for the same reason."""

REPEATED = {KILLED: "rowwise", AGAIN: RECIPES[0]}
"""Run -> the run that it repeats."""

_MOST_SECONDS = 10.0
_CURVE_STEPS = 10
"""Steps that a point of a loss curve is the mean of."""


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


class Runs:
    """Trains in processes of their own; the losses of a run that ended are read, not computed again.

    Args:
      folder: of results and checkpoints.
      sizes: of the model, and the steps of a run, at least 4.
      device: where it trains.
      deadline: no run lasts longer than its rest.
    """

    def __init__(self, folder: pathlib.Path, sizes: Sizes, device: torch.device, deadline: Deadline) -> None:
        self._folder, self._num_steps, self._deadline = folder, sizes.train_steps, deadline
        self._arguments = [f"--sizes={sizes.name}", f"--device={device.type}", f"--steps={sizes.train_steps}"]
        folder.mkdir(parents=True, exist_ok=True)

    def whole(self, recipe: str, suffix: str = "") -> dict[str, Any]:
        """A run from the first step to the last; one for each suffix.

        Raises:
          ProcessFailed: it did not end well, or in time.
        """
        out = self._folder / f"{recipe}{suffix}.json"
        if not out.exists():
            self._train(recipe, out)
        return json.loads(out.read_text(encoding="utf-8"))

    def killed_and_resumed(self, recipe: str) -> dict[str, Any]:
        """A run that SIGKILL ends after its checkpoint, and that another process takes up there.

        Raises:
          ProcessFailed: a process did not end as it should, or in time.
        """
        out, checkpoint = self._folder / f"{recipe}_resumed.json", self._folder / f"{recipe}.pt"
        if not out.exists():
            if not checkpoint.exists():
                kill_at = self._num_steps // 2 + max(1, self._num_steps // 20)
                self._train(
                    recipe, out, f"--checkpoint={checkpoint}", f"--kill_at={kill_at}", exit_code=-signal.SIGKILL
                )
            self._train(recipe, out, f"--checkpoint={checkpoint}")
            checkpoint.unlink()
        return json.loads(out.read_text(encoding="utf-8"))

    def _train(self, recipe: str, out: pathlib.Path, *more: str, exit_code: int = 0) -> None:
        processes.run_module(
            "tools.gpu_check.layers_train", f"--recipe={recipe}", f"--out={out}", *self._arguments, *more,
            # What cuBLAS needs to be deterministic (torch.use_deterministic_algorithms).
            environment={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
            limit_s=self._deadline.left,
            exit_code=exit_code,
        )  # fmt: skip


def measure(part: Part, sizes: Sizes, clock: Clock) -> None:
    """One row, of the time of a step; and the losses of all runs."""
    part.measure(
        [{"tokens": sizes.train_batch * sizes.train_model["length"]}],
        lambda case: ({}, _steps(sizes, clock)),
        timing(clock, sizes.rounds),
        judge=failures,
        most_s=_MOST_SECONDS,
    )
    runs = Runs(part.folder(), sizes, clock.device, part.deadline)
    # Nothing is timed while they run, so they run at once; processes on a CPU would only wait for each other.
    results: dict[str, dict[str, Any]] = {}
    failed = []
    with concurrent.futures.ThreadPoolExecutor(5 if clock.device.type == "cuda" else 1) as pool:
        futures = {name: pool.submit(runs.whole, name) for name in RECIPES}
        futures[AGAIN] = pool.submit(runs.whole, REPEATED[AGAIN], "_again")
        futures[KILLED] = pool.submit(runs.killed_and_resumed, REPEATED[KILLED])
        for name, future in futures.items():
            try:
                results[name] = future.result()
            except ProcessFailed as error:
                failed.append(f"{name}: {error}")
    losses, wrong = judged(results, sizes.train_mean_steps)
    part.say(str({name: one["last_mean"] for name, one in losses.items()}))
    facts = {name: one for result in results.values() for name, one in result.items() if name not in _OF_A_RUN}
    part.report |= {
        **facts,
        "model": dict(sizes.train_model),
        "mean_steps": sizes.train_mean_steps,
        "limits": {"loss": LOSS_LIMIT},
        "losses": losses,
        "wrong": failed + wrong,
    }


_OF_A_RUN = ("losses", "first_step")


def judged(results: Mapping[str, Mapping[str, Any]], mean_steps: int) -> tuple[dict[str, Any], list[str]]:
    """For each run its curve and the mean of its last losses, and what is wrong with them."""
    found: dict[str, Any] = {}
    wrong = []
    for name, result in results.items():
        losses = result["losses"]
        last = statistics.fmean(losses[-mean_steps:])
        found[name] = {
            "steps": len(losses),
            "first_step": result["first_step"],
            "last_mean": round(last, 5),
            "curve": [
                round(statistics.fmean(losses[start : start + _CURVE_STEPS]), 4)
                for start in range(0, len(losses), _CURVE_STEPS)
            ],
        }
        if not all(map(math.isfinite, losses)):
            wrong.append(f"{name}: a loss is not finite")
    reference = found.get(RECIPES[0])
    for name in found.keys() & set(RECIPES[1:]) if reference else ():
        off = found[name]["last_mean"] / reference["last_mean"] - 1
        found[name]["against_bf16"] = round(off, 5)
        if not abs(off) < LOSS_LIMIT:
            wrong.append(f"{name}: the last losses' mean is {off:+.2%} of bf16's and must be within {LOSS_LIMIT:.0%}")
    for name, whole in REPEATED.items():
        if name in found and whole in found:
            found[name]["first_difference"] = _first_difference(results[name]["losses"], results[whole]["losses"])
    if KILLED in found:
        if (at := found[KILLED].get("first_difference")) is not None:
            wrong.append(f"{KILLED}: its losses must be those of the whole run and differ from step {at} on")
        if not results[KILLED]["first_step"]:
            wrong.append(f"{KILLED}: it began at step 0 and must go on from its checkpoint")
    return found, sorted(wrong)


def _first_difference(losses: Sequence[float], others: Sequence[float]) -> int | None:
    """The step of the first loss that differs, or that only one run has; None where they are the same."""
    pairs = itertools.zip_longest(losses, others)
    return next((step for step, (one, other) in enumerate(pairs) if one != other), None)


def _steps(sizes: Sizes, clock: Clock) -> dict[str, Call]:
    """A step of each recipe, as the runs make it, without deterministic algorithms."""
    data = text()

    def step_of(recipe: str) -> Call:
        training = Training(recipe, sizes, clock.device)
        return lambda: training.step(data, 0)

    return {recipe: step_of(recipe) for recipe in RECIPES}


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
