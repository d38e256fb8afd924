"""Ranking of a sweep's trials by the metric gain per dollar."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ebbflow.flows.own_flow.trained_model import TrainedModel

LOSS = "loss"  # the mean of the last tenth of a trial's recorded losses
HELD_OUT_LOSS = "held_out_loss"
MODES = ("min", "max")
_COLUMNS = ("rank", "trial", "metric", "gain per $", "$", "steps", "interruptions", "outcome")
_LAST_SHARE = 10
_LONGEST_LABEL = 40


class RankingError(ValueError):
    """Error: trials cannot be ranked. The message names the fix."""


@dataclass(frozen=True, kw_only=True)
class RankedTrial:
    """A trial of a sweep, with its metric and its gain per dollar.

    Attributes:
        label: The input of its foreach, or the name of its job.
        value: The metric at the trial's end; None if it has none.
        gain_per_usd: The metric per dollar with "max", its decrease per dollar with "min"; None
            without a metric or dollars.
    """

    label: str
    model: TrainedModel
    value: float | None
    gain_per_usd: float | None


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The trials of a sweep, ordered by gain per dollar, best first. Trials without a metric are
    last.
    """

    metric: str
    mode: str  # min or max: which metric is the best
    trials: tuple[RankedTrial, ...]

    @property
    def best(self) -> TrainedModel | None:
        """The model with the best metric, regardless of its cost, or None if no trial has the
        metric.
        """
        valued = [(trial.value, trial.model) for trial in self.trials if trial.value is not None]
        pick = max if self.mode == "max" else min
        return pick(valued, key=lambda pair: pair[0])[1] if valued else None

    @property
    def usd(self) -> float:
        """Cost of all trials together in dollars."""
        return sum(trial.model.usd for trial in self.trials)

    def to_text(self) -> str:
        """Render the ranking as a table."""
        rows = [_COLUMNS, *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([self._headline(), *lines])

    def to_html(self) -> str:
        """Render the ranking as a self-contained HTML page."""
        head = "".join(f"<th>{html.escape(name)}</th>" for name in _COLUMNS)
        body = ""
        for row in self._rows():
            cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
            body += f"<tr>{cells}</tr>"
        style = (
            "body{font:14px system-ui,sans-serif;margin:2em}td,th{padding:.3em .9em;text-align:left;"
            "border-bottom:1px solid #ddd}"
        )
        return (
            f'<!doctype html><meta charset="utf-8"><style>{style}</style>'
            f"<h1>{html.escape(self._headline())}</h1><table><tr>{head}</tr>{body}</table>"
        )

    def _headline(self) -> str:
        kinds = {trial.model.price_kind for trial in self.trials if trial.model.usd > 0}
        return (
            f"{len(self.trials)} trials, ${self.usd:.4f} ({' and '.join(sorted(kinds)) or 'unpriced'}), "
            f"by {self.metric} ({self.mode}) per dollar"
        )

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for number, trial in enumerate(self.trials, start=1):
            model = trial.model
            yield (
                str(number),
                trial.label,
                _format(trial.value),
                _format(trial.gain_per_usd),
                f"{model.usd:.4f}",
                str(model.steps),
                str(model.interruptions),
                model.outcome,
            )


def rank_trials(
    trials: Iterable[tuple[str, TrainedModel]], *, metric: str | None, mode: str | None
) -> Ranking:
    """Rank trials by their metric per dollar.

    Args:
        trials: Label and model of each trial.
        metric: A metric that the trials have logged. None: the held-out loss if a trial has it, else
            the training loss.
        mode: "min" or "max". None: "min" for these two losses.

    Raises:
        RankingError: There is no trial, no trial has the metric, or the mode is missing or unknown.
    """
    listed = list(trials)
    if not listed:
        raise RankingError("no input has a trained model as an artifact; fix: self.model = …")
    chosen = metric
    if chosen is None:
        has_held_out = any(_find_value(model, HELD_OUT_LOSS) is not None for _, model in listed)
        chosen = HELD_OUT_LOSS if has_held_out else LOSS
    direction = mode
    if direction is None and chosen in (LOSS, HELD_OUT_LOSS):
        direction = "min"
    if direction not in MODES:
        raise RankingError(
            f"rank(metric={chosen!r}, mode={mode!r}) does not say which value is the best; fix: "
            'mode="max" or mode="min"'
        )
    ranked = [_judge(label, model, chosen, direction) for label, model in listed]
    known: set[str] = set()
    for _, model in listed:
        known |= _read_metrics(model).keys()
    has_trained = any(model.steps > 0 for _, model in listed)
    if has_trained and all(trial.value is None for trial in ranked):
        names = ", ".join(sorted(known)) or "none"
        raise RankingError(
            f"no trial has the metric {chosen!r}; fix: job.log({chosen}=…), or one of those that "
            f"were logged: {names}"
        )
    ranked.sort(key=_sort_key)
    return Ranking(metric=chosen, mode=direction, trials=tuple(ranked))


def _judge(label: str, model: TrainedModel, metric: str, mode: str) -> RankedTrial:
    value = _find_value(model, metric)
    first = _find_first(model, metric)
    gain = value
    if mode == "min" and value is not None:
        gain = None if first is None else first - value
    per_usd = None
    if gain is not None and model.usd > 0:
        per_usd = gain / model.usd
    return RankedTrial(label=label[:_LONGEST_LABEL], model=model, value=value, gain_per_usd=per_usd)


def _sort_key(trial: RankedTrial) -> tuple[bool, float, str]:
    if trial.gain_per_usd is None:
        return True, trial.model.usd, trial.label
    return False, -trial.gain_per_usd, trial.label


def _find_value(model: TrainedModel, metric: str) -> float | None:
    """Return the final value of a trial's metric. For the training loss, it is the mean of the last
    tenth.
    """
    if metric == LOSS:
        losses = _read_losses(model)
        last = losses[-max(1, len(losses) // _LAST_SHARE) :]
        return sum(last) / len(last) if last else None
    return _finite(_read_metrics(model).get(metric))


def _find_first(model: TrainedModel, metric: str) -> float | None:
    """Return a metric's first value. For a loss, it is the first training loss."""
    losses = _read_losses(model)
    if metric in (LOSS, HELD_OUT_LOSS) and losses:
        return losses[0]
    charts = model.report.get("charts") or {}
    evaluations = charts.get("evaluations")
    for row in [] if evaluations is None else evaluations["rows"]:
        value = _finite(row["metrics"].get(metric))
        if value is not None:
            return value
    return None


def _read_metrics(model: TrainedModel) -> dict[str, object]:
    actual = model.report["actual"]
    metrics: dict[str, object] = dict(actual.get("metrics") or {})
    held_out = actual.get("held_out_loss")
    if held_out is not None:
        metrics[HELD_OUT_LOSS] = held_out
    return metrics


def _read_losses(model: TrainedModel) -> list[float]:
    losses = [_finite(loss) for _, loss in model.report["loss_curve"]]
    return [loss for loss in losses if loss is not None]


def _finite(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
