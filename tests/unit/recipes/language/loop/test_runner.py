from __future__ import annotations

from recipes.language.loop.reasoning_runner import group_metrics
from recipes.language.prompts.prompt_messages import GroupReport


def group(slot: int, rewards: tuple[float, ...], tokens: int = 10, **given: object) -> GroupReport:
    found = {
        "step": 1,
        "problem": slot,
        "source": "sums",
        "difficulty": "",
        "lengths": tuple(2 for _ in rewards),
        "truncated": 0,
        "failures": {},
        "parts": {},
        "oldest": 0,
        "version_sum": 0,
        **given,
    }
    return GroupReport(slot=slot, rewards=rewards, tokens=tokens, **found)  # type: ignore[arg-type]


def test_figures_of_a_step() -> None:
    groups = [
        group(0, (1.0, 0.0), truncated=1, parts={"style": 3.0}),
        group(1, (1.0, 1.0), failures={"timeout": 2}),
        group(2, (), tokens=0, skipped=True),
    ]

    found = group_metrics(groups)

    assert found["rollout/reward"] == 0.75
    assert found["rollout/truncated"] == 0.25
    assert found["rollout/prompts_skipped"] == 1
    assert found["rollout/response_length"] == 2
    assert found["rollout/prompt_length"] == 3
    assert found["failed/timeout"] == 2
    assert found["reward/style"] == 0.75
