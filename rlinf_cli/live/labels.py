"""Labels of metrics and phases, the same in the live view, in plain lines and in the summary."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from rlinf_core.runners import events

_PHASES = {
    events.LAUNCH: "starting the workers",
    events.SYNC_WEIGHTS: "syncing weights to the rollout",
    events.GENERATE_ROLLOUTS: "collecting rollouts",
    events.ADVANTAGES: "computing advantages",
    events.ACTOR_TRAINING: "training the actor",
    events.EVALUATE: "evaluating",
    events.SAVE_CHECKPOINT: "writing a checkpoint",
}
# Short names of phases, as in `time/` metrics.
_SHORT = {
    events.SYNC_WEIGHTS: "sync",
    events.GENERATE_ROLLOUTS: "rollout",
    events.ADVANTAGES: "advantages",
    events.ACTOR_TRAINING: "training",
}
# Headline metrics, by name below `env/`, `eval/` or `rollout/` or by full name; the first available is shown.
_HEADLINES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("success", ("success_at_end", "success_once")),
    ("return", ("return",)),
    ("reward", ("reward",)),
    ("accuracy", ("accuracy",)),
    ("pass@1", ("pass@1",)),
    ("loss", ("loss", "train/actor/loss")),
    ("length", ("episode_len", "response_length")),
    ("truncated", ("truncated",)),
    ("kept", ("groups_kept",)),
    ("staleness", ("staleness_mean", "staleness")),
    ("tokens/s", ("tokens_per_second",)),
    ("trained tokens/s", ("train/actor/tokens_per_second",)),
)
# Values that are not worth showing: all groups were used, or all samples come from the newest weights.
_NOTHING_SAID = {("kept", 1.0), ("staleness", 0.0)}
# Below, a float is exact to the last digit.
_MOST_WHOLE = 1e15
_LOSSES: tuple[tuple[str, str], ...] = (
    ("policy loss", "train/actor/policy_loss"),
    ("value loss", "train/critic/value_loss"),
    ("kl", "train/actor/approx_kl"),
    ("clipped", "train/actor/clip_fraction"),
    ("grad norm", "train/actor/grad_norm"),
)


def phase_words(phase: str) -> str:
    """Return a phase in words, as in `collecting rollouts`; an unknown phase keeps its name."""
    return _PHASES.get(phase, phase.replace("_", " "))


def doing(phase: str, done: str) -> str:
    """Return a run's activity and, if known, its progress: `evaluating, 12 of 64 answers`."""
    words = phase_words(phase) if phase else "running"
    return f"{words}, {done}" if done else words


def short_phase(phase: str) -> str:
    """Return a phase's short name, as in `rollout` or `training`."""
    return _SHORT.get(phase, phase.replace("_", " "))


class Headline(NamedTuple):
    """A headline metric: its label, its value, and its figure with the number of items behind it, if incomplete."""

    word: str
    value: float
    text: str


def headlines(metrics: Mapping[str, float], *namespaces: str) -> list[tuple[str, str]]:
    """Return the headline figures: `[("success", "0.92"), ("return", "17.2")]`.

    Args:
        namespaces: the namespaces to search, as in `env`, `rollout`; the first match wins.
    """
    return [(headline.word, headline.text) for headline in _headlines(metrics, namespaces)]


def first_headline(metrics: Mapping[str, float], *namespaces: str) -> Headline | None:
    """Return the first of the headline metrics, see `headlines`; None if there is none."""
    return next(iter(_headlines(metrics, namespaces)), None)


def _headlines(metrics: Mapping[str, float], namespaces: Sequence[str]) -> list[Headline]:
    headlines: list[Headline] = []
    counts = counts_text(metrics, namespaces[0]) if namespaces else ""
    for word, names in _HEADLINES:
        value = _first(metrics, [name if "/" in name else f"{space}/{name}" for space in namespaces for name in names])
        if value is not None and (word, value) not in _NOTHING_SAID:
            counted = any(f"{namespaces[0]}/{name}" in metrics for name in names)
            headlines.append(Headline(word, value, figure(value) + (counts if counted else "")))
            counts = "" if counted else counts
    # In environments the return is the sum of the rewards, so the reward is left out.
    words = {headline.word for headline in headlines}
    return [headline for headline in headlines if headline.word != "reward" or "return" not in words]


def training(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the headline metrics of a training step; without a return yet, also the number of ended episodes."""
    ended = metrics.get("env/episodes") if "env/return" not in metrics else None
    counted = [] if ended is None else [("episodes ended", figure(ended))]
    return counted + headlines(metrics, "env", "rollout")


def counts_text(metrics: Mapping[str, float], namespace: str) -> str:
    """Return the number of items behind a metric if some were left out, skipped, failed or cut off.

    The text reads like ` of 15, 1 left out`; it is empty if the metric covers everything.
    """
    counted = _first(metrics, [f"{namespace}/{name}" for name in ("episodes", "answers", "rows")])
    words = {
        "left_out": "left out",
        "prompts_skipped": "too long",
        "env_errors": "failed by errors of the environment",
        "cut_off": "cut off at the limit of tokens",
    }
    parts = [f"{figure(count)} {word}" for name, word in words.items() if (count := metrics.get(f"{namespace}/{name}"))]
    return f" of {figure(counted or 0)}, {', '.join(parts)}" if parts else ""


def headline_metric(names: Collection[str], namespace: str) -> str | None:
    """Return the full name of the headline metric of a namespace; None if there is none."""
    metric_names = (f"{namespace}/{name}" for _, those in _HEADLINES for name in those if "/" not in name)
    return next((name for name in metric_names if name in names), None)


def losses(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the metrics of learning: losses, divergence, gradients."""
    return [(word, figure(metrics[name])) for word, name in _LOSSES if name in metrics]


def conversations(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the metrics of agents: turns per run, share of failed tool calls, share of time spent on tools."""
    turns, calls = metrics.get("agent/turns"), metrics.get("agent/tool_calls", 0.0)
    figures = [] if turns is None else [("turns", figure(turns))]
    if calls:
        failed = metrics.get("agent/tool_errors", 0.0) + metrics.get("agent/tool_timeouts", 0.0)
        figures.append(("tool errors", f"{failed / calls:.0%}"))
        waited = sum(value for name, value in metrics.items() if name.startswith("agent/tool_seconds/"))
        # Concurrent tool calls may add up to more than the run's time.
        total = max(metrics.get("agent/seconds", 0.0), waited)
        figures.append(("waiting for tools", f"{waited / total if total else 0:.0%}"))
    return figures


def figures_text(figures: list[tuple[str, str]]) -> str:
    """Return figures as in `success 0.92, return 17.2`."""
    return ", ".join(f"{word} {text}" for word, text in figures)


def figure(value: float) -> str:
    """Return a number with three significant digits, or a whole number in full: `0.923`, `17.2`, `475`."""
    whole = abs(value) < _MOST_WHOLE and (abs(value) >= 100 or value == int(value))
    return f"{value:.0f}" if whole else f"{value:.3g}"


def clock(seconds: float) -> str:
    """Return a time as in `0:42`, `12:07`, `3:04:05`; `unknown` if negative, as after the clock was set back."""
    if seconds < 0:
        return "unknown"
    total = int(seconds)
    hours, minutes, rest = total // 3600, total // 60 % 60, total % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def speed(per_second: float) -> str:
    """Return a speed as in `7.1 steps/s`, or `12 s/step` below one step per second."""
    return f"{figure(per_second)} steps/s" if per_second >= 1 else f"{figure(1 / per_second)} s/step"


def duration(seconds: float) -> str:
    """Return a duration as in `140 ms` or `3.2 s`."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{figure(seconds)} s"


def _first(metrics: Mapping[str, float], names: list[str]) -> float | None:
    return next((metrics[name] for name in names if name in metrics), None)
