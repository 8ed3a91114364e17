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
from typing import Any, TypeVar

EXHAUSTIVE_LIMIT = 300
"""Above this, timing every config would take longer than a search saves."""

ABSENT = "(absent)"

_LOG = logging.getLogger("stoneware.measuring")

C = TypeVar("C", bound=Any)
Measure = Callable[[Sequence[C]], Mapping[C, "float | None"]]


def run(
    configs: Sequence[C],
    measure: Measure[C],
    *,
    always: Sequence[C] = (),
    known: Mapping[C, float | None] | None = None,
    most_trials: int = 100,
) -> dict[C, float | None]:
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


def parameters(config: Any) -> dict[str, str]:
    """A config as categorical parameters: its JSON, with nested names joined by dots."""
    flat: dict[str, str] = {}
    for name, value in config.to_json().items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{inner}": repr(item) for inner, item in value.items()})
        else:
            flat[name] = repr(value)
    return flat


def _search(
    optuna: Any,
    configs: Sequence[C],
    measure: Measure[C],
    always: Sequence[C],
    known: Mapping[C, float | None],
    most_trials: int,
) -> dict[C, float | None]:
    flat = {config: parameters(config) for config in dict.fromkeys([*configs, *always, *known])}
    names = sorted({name for point in flat.values() for name in point})
    points = {config: {name: point.get(name, ABSENT) for name in names} for config, point in flat.items()}
    space = {
        name: optuna.distributions.CategoricalDistribution(sorted({point[name] for point in points.values()}))
        for name in names
    }
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, multivariate=True))
    scores: dict[C, float] = {}

    def learn(config: C, us: float | None, reference_us: float) -> None:
        # Infinity ranks last, so that the search leaves the neighbours of what fails alone.
        scores[config] = math.inf if us is None else us / reference_us
        study.add_trial(optuna.trial.create_trial(params=points[config], distributions=space, value=scores[config]))

    measured = dict(measure(always)) if always else {}
    base = always[0] if always and measured[always[0]] else None
    base_us = measured[base] if base is not None else 1.0
    for config, us in {**known, **measured}.items():
        learn(config, us, base_us)
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
        learn(config, timed[config], (timed[base] if base is not None else None) or base_us)
    return measured
