"""Which configs of a decorated kernel to measure: all of them, or those that a search tries.

Up to EXHAUSTIVE_LIMIT configs are all timed against each other. Above it the tree-structured Parzen
estimator of optuna (an extra: stoneware[search]) proposes one config after the other. Each is timed
against the best so far and `always`, and scored by its time over that of the first of these, so that
a change of clock between two trials does not count. Configs are rarely a full product of their
parameters: a proposal that is not among them stands for the untried one that differs in the fewest.
The seed is fixed: equal timings give equal proposals.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stoneware.kernels.config import KernelConfig

EXHAUSTIVE_LIMIT = 300
"""Above this, timing every config would take longer than a search saves."""

ABSENT = "(absent)"

_LOG = logging.getLogger("stoneware.measuring")

Measure = Callable[[Sequence[KernelConfig]], Mapping[KernelConfig, "float | None"]]


def run(
    configs: Sequence[KernelConfig],
    measure: Measure,
    *,
    always: Sequence[KernelConfig] = (),
    known: Mapping[KernelConfig, float | None] | None = None,
    most_trials: int = 100,
) -> dict[KernelConfig, float | None]:
    """Measures configs.

    Args:
      configs: the candidates.
      measure: times configs against each other; medians in microseconds, None for one that does
        not run.
      always: each trial is timed against these, the default first.
      known: medians of configs that were measured before.
      most_trials: number of configs that a search tries.

    Returns:
      The first median of each config that was measured.
    """
    if len(configs) <= EXHAUSTIVE_LIMIT:
        return dict(measure(configs)) if configs else {}
    try:
        import optuna
    except ImportError:
        _LOG.warning(
            "all %d configs are measured: a search among more than %d needs optuna; pip install 'stoneware[search]'",
            len(configs),
            EXHAUSTIVE_LIMIT,
        )
        return dict(measure(configs))
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # else each study is announced
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return _search(optuna, configs, measure, always, known or {}, most_trials)
    finally:
        optuna.logging.set_verbosity(verbosity)


def parameters(config: KernelConfig) -> dict[str, str]:
    """A config as categorical parameters: its JSON, with the kernel's own as `kwargs.NAME`."""
    options = config.to_json()
    flat = {f"kwargs.{name}": value for name, value in options.pop("kwargs").items()}
    return {name: repr(value) for name, value in {**flat, **options}.items()}


def _search(
    optuna: Any,
    configs: Sequence[KernelConfig],
    measure: Measure,
    always: Sequence[KernelConfig],
    known: Mapping[KernelConfig, float | None],
    most_trials: int,
) -> dict[KernelConfig, float | None]:
    flat = {config: parameters(config) for config in dict.fromkeys([*configs, *always, *known])}
    names = sorted({name for point in flat.values() for name in point})
    points = {config: {name: point.get(name, ABSENT) for name in names} for config, point in flat.items()}
    space = {
        name: optuna.distributions.CategoricalDistribution(sorted({point[name] for point in points.values()}))
        for name in names
    }
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, multivariate=True))
    scores: dict[KernelConfig, float] = {}

    def learn(config: KernelConfig, timed: Mapping[KernelConfig, float | None]) -> None:
        us, reference_us = timed[config], timed.get(always[0]) if always else None
        # Infinity ranks last, so that the search leaves the neighbours of what fails alone.
        scores[config] = math.inf if us is None else us / (reference_us or base_us)
        study.add_trial(optuna.trial.create_trial(params=points[config], distributions=space, value=scores[config]))

    measured = dict(measure(always)) if always else {}
    base_us = (measured[always[0]] if always else None) or 1.0
    before = {**known, **measured}
    for config in before:
        learn(config, before)
    untried = [config for config in configs if config not in scores]
    for _ in range(min(most_trials, len(untried))):
        trial = study.ask(space)
        proposal = trial.params
        study.tell(trial, state=optuna.trial.TrialState.FAIL)  # what is tried is learnt below
        config = min(untried, key=lambda other: sum(points[other][name] != proposal[name] for name in names))
        untried.remove(config)
        rivals = dict.fromkeys([*sorted(scores, key=scores.__getitem__)[:1], *always])
        timed = measure([config, *rivals])
        measured[config] = timed[config]
        learn(config, timed)
    return measured
