"""The rules of a replay buffer on a memory budget."""

from __future__ import annotations

import pytest

from rlinf_cli.lint.load import load_with_lint

SAC = ("actor.model.model_type=squashed_policy", "algorithm.loss_type=sac")
REPLAY = "algorithm.off_policy.replay"


def told(*overrides: str) -> list[tuple[str, str]]:
    found = load_with_lint("laptop", (*SAC, *overrides), environ={}).diagnostics
    return [(each.code, each.message) for each in found]


@pytest.mark.parametrize(
    ("replay", "code", "said"),
    [
        ("{memory_gib: 2}", "conflicting-settings", "spills to a folder, but none is set"),
        (
            "{memory_gib: 2, spill_path: rows, image_memory_gib: 1}",
            "conflicting-settings",
            "compresses images and drops the oldest",
        ),
        ("{spill_path: rows}", "no-effect", "`memory_gib` is not set"),
    ],
)
def test_a_memory_budget_needs_a_folder_and_nothing_else(replay: str, code: str, said: str) -> None:
    found = told(f"{REPLAY}={replay}")
    assert [message for each, message in found if each == code and said in message], found


def test_a_memory_budget_with_a_folder_is_right() -> None:
    assert told(f"{REPLAY}={{memory_gib: 2, spill_path: rows}}") == told()


def test_td3_bc_needs_recorded_transitions_and_noise() -> None:
    reported = told("algorithm.loss_type=td3_bc")
    missing = [message for code, message in reported if code == "missing-key"]
    assert any("learns from recorded transitions alone" in message for message in missing)
    assert any("`loss_type: td3_bc` explores with noise" in message for _, message in reported)


def test_iql_needs_recorded_transitions_and_targets() -> None:
    reported = told("algorithm.loss_type=iql", "algorithm.off_policy.critic_norm=batch")
    assert any(code == "missing-key" and "learns from recorded transitions alone" in text for code, text in reported)
    assert any("`critic_norm: batch` has none" in text for _, text in reported)
    assert not any("explores with noise" in text for _, text in reported)
    other = told("algorithm.off_policy.expectile=0.9")
    assert any(code == "no-effect" and "does not weigh recorded actions" in text for code, text in other)


def test_td3_bc_has_no_share_of_demonstrations() -> None:
    reported = told("algorithm.loss_type=td3_bc", f"{REPLAY}.demonstrations_share=0.25")
    assert any(code == "no-effect" and "learns from demonstrations alone" in message for code, message in reported)
    other = told("algorithm.off_policy.cloning_scale=3")
    assert any(code == "no-effect" and "does not imitate" in message for code, message in other)
