"""A reward of your own for a language model: half of it for an answer that is only nearly right.

In this folder, `rlinf train math/sums-laptop reward.reward_type=own_reward:score` trains with it. `math/sums-laptop` is
a shipped file: a small random model learns sums of one digit.
"""

from __future__ import annotations


def score(text: str, answer: str) -> dict[str, float]:
    """Return the reward of one answer; other keys become metrics, as in `reward/distance`.

    Args:
        text: what the model answered.
        answer: the right answer of the problem.
    """
    try:
        distance = abs(int(text) - int(answer))
    except ValueError:  # not a number
        return {"reward": 0.0, "correct": 0.0, "number": 0.0}
    return {"reward": max(0.0, 1.0 - distance / 2), "correct": float(distance == 0), "number": 1.0}


if __name__ == "__main__":
    for text in ("7", "8", "12", "seven"):
        print(f"{text!r} for 3+4: {score(text, '7')}")
