"""The settings of a request, as a file has them; `validate` makes them, too, so nothing here imports torch."""

from __future__ import annotations

from recipes.language.answers.sequences import SamplingParams
from recipes.language.config import LanguageConfig


def sampling_params(config: LanguageConfig, temperature: float, seed: int) -> SamplingParams:
    """Return the sampling parameters of `rollout.sampling_params`, with another temperature.

    Raises:
        ValueError: a value makes no sense; its message begins with the name of the key.
    """
    sampling = config.rollout.sampling_params
    return SamplingParams(
        temperature=temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
        stop=tuple(sampling.stop),
        seed=seed,
    )
