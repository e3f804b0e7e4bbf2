"""A reward for a language model's answers, with half credit for near misses."""

from __future__ import annotations


def score(text: str, answer: str) -> dict[str, float]:
    """Return the reward of one answer; other keys become metrics, as in `reward/number`.

    Args:
        text: what the model answered.
        answer: the right answer of the problem.
    """
    try:
        distance = abs(int(text) - int(answer))
    except ValueError:  # not a number
        return {"reward": 0.0, "correct": 0.0, "number": 0.0}
    return {"reward": max(0.0, 1.0 - distance / 2), "correct": float(distance == 0), "number": 1.0}
