"""The comparison of what demonstrations say with what the environments do: what is noted, told and refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.data_facts import DataFacts, StartFacts, facts_of
from recipes.demonstrations.demonstrations import Demonstrations
from recipes.embodied.loop.data_check import check_data_facts
from rlinf_core.runners.storage.first_contact import ContactCheck, read_comparisons

OPEN, CLOSE = "open the drawer", "close the drawer"


class Group:
    """Workers that return facts, by rank."""

    def __init__(self, *by_rank: Any) -> None:
        self._by_rank = by_rank

    def _facts(self) -> Any:
        return SimpleNamespace(wait=lambda: list(self._by_rank))

    data_facts = env_facts = _facts


def facts(**changes: Any) -> DataFacts:
    first = DataFacts("set", 20.0, (OPEN, CLOSE), True, {"main": "main"}, (), ((-1.0, 1.0, 0.0, 0.5),))
    return first._replace(**changes)


def compare(folder: Path, data: DataFacts | None, *seen: StartFacts, **options: Any) -> dict[str, ContactCheck]:
    record: Any = SimpleNamespace(step=options.pop("step", 0), folder=SimpleNamespace(path=folder))
    check_data_facts(Group(None, data), Group(*seen), record, "env.eval", **options)
    return {check.what.partition(" of ")[0]: check for check in read_comparisons(folder)}


def test_what_agrees_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    noted = compare(tmp_path, facts(), StartFacts(20.0, (OPEN,)))
    assert list(noted) == ["instructions", "cameras", "rate", "actions"]
    assert {check.verdict for check in noted.values()} == {"agrees"}
    assert noted["actions"].note.endswith("0: -1 to 1, 0 +- 0.5")
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        (("3", "task_7"), "write the sentence of each task"),
        (("open_the_drawer",), "write the sentence of each task"),
        (("push the block",), "give the data set and the environments the same sentences"),
        (("Open the drawer.",), "give the data set and the environments the same sentences"),
    ],
)
def test_instructions_that_nobody_learned_are_refused(tmp_path: Path, said: tuple[str, ...], remedy: str) -> None:
    with pytest.raises(DatasetError, match=r"env.eval says `open the drawer`, an instruction that no demon") as caught:
        compare(tmp_path, facts(instructions=said), StartFacts(20.0, (OPEN,)))
    assert caught.value.where == "set"
    assert f"`{said[0]}`" in str(caught.value.why)
    assert str(caught.value.help).startswith(remedy)
    assert "differs" in [check.verdict for check in read_comparisons(tmp_path)]


def test_some_other_instructions_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen = StartFacts(20.0, (OPEN,)), StartFacts(20.0, (OPEN, CLOSE))
    assert compare(tmp_path, facts(instructions=(OPEN,)), *seen)["instructions"].verdict == "differs"
    assert "the environments say `close the drawer`; the demonstrations say `open the drawer`" in caplog.text


def test_a_policy_without_instructions_may_learn_from_others(tmp_path: Path) -> None:
    noted = compare(tmp_path, facts(reads_instructions=False, instructions=("3",)), StartFacts(20.0, (OPEN,)))
    assert noted["instructions"].verdict == "agrees"
    assert noted["instructions"].note.endswith("the policy acts by none")


@pytest.mark.parametrize(
    ("changes", "name", "note"),
    [
        ({"fps": 30.0}, "rate", "30 rows a second; the environments take 20 actions a second"),
        ({"cameras": {"main": "top"}, "guessed": ("main",)}, "cameras", "write `data.cameras: {main: top}`"),
        ({"actions": ((-0.01, 0.012, 0.0, 0.0),)}, "actions", "none is beyond 0.012"),
    ],
)
def test_a_difference_is_told_and_not_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], name: str, note: str
) -> None:
    noted = compare(tmp_path, facts(**changes), StartFacts(20.0, None))
    assert [key for key, check in noted.items() if check.verdict == "differs"] == [name]
    assert note in noted[name].note
    assert note in caplog.text


def test_rates_of_a_rounded_name_agree(tmp_path: Path) -> None:
    assert compare(tmp_path, facts(fps=29.97), StartFacts(30.0, None))["rate"].verdict == "agrees"


def test_skipped_comparison_refuses_nothing(tmp_path: Path) -> None:
    (check,) = compare(tmp_path, facts(instructions=("3",)), StartFacts(20.0, (OPEN,)), skips=True).values()
    assert (check.verdict, check.note) == ("skipped", "left out by `runner.skip_checks`")


def test_nothing_is_compared_without_data_or_later_on(tmp_path: Path) -> None:
    assert compare(tmp_path, None, StartFacts(20.0, (OPEN,))) == {}
    assert compare(tmp_path, facts(instructions=("3",)), StartFacts(20.0, (OPEN,)), step=2) == {}


def test_facts_are_those_of_the_rows_that_are_learned_from() -> None:
    actions = np.array([[0.5], [-0.25], [0.5], [-0.25]], np.float32)
    data = Demonstrations("set", 20, np.array([0, 4]), actions, None, {}, ("never", OPEN), np.ones(4, np.int64))
    cameras = {"main": "agentview_rgb", "wrist": "hand", "side": "left"}
    learned = facts_of(data, cameras, {"side": "left"})
    assert learned.instructions == (OPEN,)
    assert learned.guessed == ("wrist",)
    assert learned.actions == ((-0.25, 0.5, 0.125, 0.375),)
