"""Rules of `rollout.sampling_params`: what an engine refuses, and draws that nothing can be learned from."""

from __future__ import annotations

from typing import Final

from recipes.language.config import LanguageConfig
from recipes.language.engines.request_params import sampling_params
from recipes.sections.checks import Report
from rlinf_core.config.tree import Path

_AT: Final[Path] = ("rollout", "sampling_params")
# vLLM raises lower temperatures to this one, or takes them for 0.
_LOWEST_TEMPERATURE: Final = 0.01
# No vocabulary has a million tokens, so the most likely token has a larger share.
_LEAST_SHARE: Final = 1e-6


def check_sampling(config: LanguageConfig, report: Report) -> None:
    """Report settings that no request can have, and in training those that draw the same answer every time or let none
    end.
    """
    sampling = config.rollout.sampling_params
    try:
        sampling_params(config, sampling.temperature, seed=0)
    except ValueError as error:
        key = str(error).split("`")[1]
        place: Path = (*_AT, key, sampling.stop.index("")) if key == "stop" else (*_AT, key)
        report(place, "bad-value", str(error))
        return
    if config.runner.only_eval:
        return
    greedy = {
        "temperature": (sampling.temperature < _LOWEST_TEMPERATURE, sampling.temperature, "1"),
        "top_k": (sampling.top_k == 1, sampling.top_k, "-1"),
        "top_p": (sampling.top_p <= _LEAST_SHARE, sampling.top_p, "1"),
    }
    for key, (is_greedy, value, usual) in greedy.items():
        if is_greedy:
            report(
                (*_AT, key),
                "cannot-train",
                f"`{key}: {value:g}` always draws the most likely token: all answers to a prompt are equal, and"
                " training has nothing to compare",
                f"write `{key}: {usual}`; an evaluation with one answer to each problem is greedy by itself",
                about=[("runner", "only_eval")],
            )
    if sampling.min_new_tokens == sampling.max_new_tokens > 1:
        report(
            (*_AT, "min_new_tokens"),
            "cannot-train",
            f"`min_new_tokens: {sampling.min_new_tokens}` is `max_new_tokens`: no answer may end, every one is cut off",
            "remove it, or write a smaller number",
            about=[(*_AT, "max_new_tokens"), ("runner", "only_eval")],
        )
