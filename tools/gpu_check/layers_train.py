"""The part `train`: losses of fp8 against bf16, a run that is killed and resumed, and the time of a step."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import logging
import math
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tools.gpu_check import layers_train_run
from tools.gpu_check.layers_clock import Budget, Call, Clock, compare
from tools.gpu_check.layers_sizes import Sizes
from tools.gpu_check.layers_train_run import RECIPES, Training

LOSS_LIMIT = 0.01
"""Relative difference of the last losses' mean from bf16's."""

KILLED = "rowwise, killed and resumed"

AGAIN = "torch, again"
"""A second run of torch's own layers: where its losses differ, too, the others' may for the same reason."""

REPEATED = {KILLED: "rowwise", AGAIN: RECIPES[0]}
"""Run -> the run that it repeats."""

_MOST_SECONDS = 10.0
_CURVE_STEPS = 10
"""Steps that a point of a loss curve is the mean of."""

_MAX_OUTPUT = 400


class RunFailed(Exception):
    """A training process ended otherwise than it should; the message has the end of its output."""


class Runs:
    """Trains in processes of their own; the losses of a run that ended are read, not computed again.

    Args:
      folder: of results and checkpoints.
      key: what the results depend on; results of another key are removed.
      arguments: of layers_train_run.py, for every run.
      num_steps: of a run; at least 4.
      budget: no run lasts longer than what is left of it.
    """

    def __init__(
        self, folder: pathlib.Path, key: Mapping[str, Any], arguments: Sequence[str], num_steps: int, budget: Budget
    ) -> None:
        self._folder, self._arguments, self._num_steps, self._budget = folder, arguments, num_steps, budget
        text = json.dumps(key, sort_keys=True)
        path = folder / "key.json"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            path.write_text(text, encoding="utf-8")

    def whole(self, recipe: str, suffix: str = "") -> dict[str, Any]:
        """A run from the first step to the last; one for each suffix.

        Raises:
          RunFailed: it did not end well, or in time.
        """
        out = self._folder / f"{recipe}{suffix}.json"
        if not out.exists():
            self._train(recipe, out, 0)
        return json.loads(out.read_text(encoding="utf-8"))

    def killed_and_resumed(self, recipe: str) -> dict[str, Any]:
        """A run that SIGKILL ends after its checkpoint, and that another process takes up there.

        Raises:
          RunFailed: a process did not end as it should, or in time.
        """
        out, checkpoint = self._folder / f"{recipe}_resumed.json", self._folder / f"{recipe}.pt"
        if not out.exists():
            if not checkpoint.exists():
                kill_at = self._num_steps // 2 + max(1, self._num_steps // 20)
                self._train(recipe, out, -signal.SIGKILL, f"--checkpoint={checkpoint}", f"--kill_at={kill_at}")
            self._train(recipe, out, 0, f"--checkpoint={checkpoint}")
            checkpoint.unlink()
        return json.loads(out.read_text(encoding="utf-8"))

    def _train(self, recipe: str, out: pathlib.Path, expected_code: int, *more: str) -> None:
        command = [
            sys.executable, "-m", "tools.gpu_check.layers_train_run", f"--recipe={recipe}", f"--out={out}",
            f"--steps={self._num_steps}", *self._arguments, *more,
        ]  # fmt: skip
        # What cuBLAS needs to be deterministic (torch.use_deterministic_algorithms).
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=self._budget.left
            )
        except subprocess.TimeoutExpired as error:
            raise RunFailed(
                f"{recipe}: training must end within the part's budget and did not; start again with more "
                "--seconds, or fewer --steps"
            ) from error
        if done.returncode != expected_code:
            raise RunFailed(
                f"{recipe}: the process must end with {expected_code} and ended with {done.returncode}: "
                f"{done.stderr.strip()[-_MAX_OUTPUT:]}"
            )


def measure(sizes: Sizes, clock: Clock, budget: Budget, runs: Runs) -> dict[str, Any]:
    """The time of a step, what `runs` gave, and what was wrong: {"rows", "losses", "problems", ...}."""
    times = _times(sizes, clock, budget)
    clock.release()
    problems = [f"{name}: {one['failure']}" for name, one in times.items() if "failure" in one]
    # Nothing is timed while they run, so they run at once; processes on a CPU would only wait for each other.
    results: dict[str, dict[str, Any]] = {}
    with concurrent.futures.ThreadPoolExecutor(5 if clock.device.type == "cuda" else 1) as pool:
        futures = {name: pool.submit(runs.whole, name) for name in RECIPES}
        futures[AGAIN] = pool.submit(runs.whole, REPEATED[AGAIN], "_again")
        futures[KILLED] = pool.submit(runs.killed_and_resumed, REPEATED[KILLED])
        for name, future in futures.items():
            try:
                results[name] = future.result()
            except RunFailed as error:
                problems.append(str(error))
    losses, wrong = judged(results, sizes.train_mean_steps)
    facts = {name: one for result in results.values() for name, one in result.items() if name not in _OF_A_RUN}
    logging.info("train: %s", {name: one["last_mean"] for name, one in losses.items()})
    return {
        **facts,
        "model": dict(sizes.train_model),
        "tokens_per_step": sizes.train_batch * sizes.train_model["length"],
        "mean_steps": sizes.train_mean_steps,
        "limits": {"loss": LOSS_LIMIT},
        "rows": [{"step": times}],
        "losses": losses,
        "problems": problems + wrong,
    }


_OF_A_RUN = ("losses", "first_step")


def judged(results: Mapping[str, Mapping[str, Any]], mean_steps: int) -> tuple[dict[str, Any], list[str]]:
    """Of each run its curve and the mean of its last losses, and what is wrong with them."""
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


def _times(sizes: Sizes, clock: Clock, budget: Budget) -> dict[str, Any]:
    """Of a step of each recipe, as the runs make it but for determinism."""
    data = layers_train_run.text()

    def step_of(recipe: str) -> Call:
        training = Training(recipe, sizes, clock.device)
        return lambda: training.step(data, 0)

    steps = {recipe: step_of(recipe) for recipe in RECIPES}
    return compare(steps, clock, rounds=sizes.rounds, seconds=min(_MOST_SECONDS, budget.left / 5))
