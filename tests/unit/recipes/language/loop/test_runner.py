from __future__ import annotations

from recipes.language.loop.reasoning_runner import group_metrics
from recipes.language.prompts.prompt_messages import GroupReport


def group(slot: int, rewards: tuple[float, ...], tokens: int = 10, **options: object) -> GroupReport:
    result = {
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
        **options,
    }
    return GroupReport(slot=slot, rewards=rewards, tokens=tokens, **result)  # type: ignore[arg-type]


def test_figures_of_a_step() -> None:
    groups = [
        group(0, (1.0, 0.0), truncated=1, parts={"style": 3.0}),
        group(1, (1.0, 1.0), failures={"timeout": 2}),
        group(2, (), tokens=0, skipped=True),
    ]

    result = group_metrics(groups)

    assert result["rollout/reward"] == 0.75
    assert result["rollout/truncated"] == 0.25
    assert result["rollout/prompts_skipped"] == 1
    assert result["rollout/response_length"] == 2
    assert result["rollout/prompt_length"] == 3
    assert result["failed/timeout"] == 2
    assert result["reward/style"] == 0.75
