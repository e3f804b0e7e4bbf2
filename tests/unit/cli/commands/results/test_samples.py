"""`rlinf report --samples`: what a language model answered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.language.loop.arrivals import write_samples
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_status import RunStatus
from tests.unit.cli.typed import Cli


def sample(number: int, reward: float, text: str, **options: Any) -> dict[str, Any]:
    return {
        "slot": number,
        "sample": 0,
        "prompt": f"{number}+1=",
        "text": text,
        "answer": str(number + 1),
        "reward": reward,
        "reason": "number",
        "finish_reason": "stop",
        "parts": {},
        "tokens": [1, 2],
        "logprobs": [-0.1, -1.0],
        "versions": [3, 3],
        "pieces": [text, "<eos>"],
        **options,
    }


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Return a finished run with samples of two steps."""
    monkeypatch.chdir(tmp_path)
    made = RunFolder.create(RunnerConfig(), "math")
    write_samples(made.path, 1, [sample(0, 0.0, "early")])
    write_samples(
        made.path,
        10,
        [
            sample(0, 0.5, "half", parts={"style": 0.25}),
            sample(1, 1.0, "2"),
            sample(2, 0.0, "no\x1b[31m idea", finish_reason="length"),
        ],
    )
    made.end(RunStatus.FINISHED)
    return made


def asked(out: str) -> list[str]:
    return [line.split()[1] for line in out.splitlines() if line.strip().startswith("asked")]


def test_the_last_step_is_shown_whole(cli: Cli, run: RunFolder) -> None:
    ended = cli("samples")

    assert ended.code == 0
    assert asked(ended.out) == ["0+1=", "1+1=", "2+1="]
    assert "reward 0.5 (number), style 0.25" in ended.out
    assert "cut off at the length limit" in ended.out
    # What a model writes is no terminal control.
    assert "\x1b" not in ended.out
    assert "step 10: 3 of 3 samples" in ended.err
    assert "--step 1" in ended.err


def test_conversation_is_shown_by_turns_with_times_and_rewards(cli: Cli, run: RunFolder) -> None:
    def turn(who: str, text: str, tool: str = "", seconds: float = 0.0, failure: str = "") -> dict[str, Any]:
        return {"who": who, "text": text, "tool": tool, "seconds": seconds, "failure": failure, "segment": 0}

    turns = [
        turn("task", "1+1="),
        turn("model", "<search>1</search>\n", seconds=0.25),
        turn("reward", "+0.5"),
        turn("tool", "error: no answer", "search", 1.5, "timeout"),
    ]
    write_samples(run.path, 10, [sample(1, 1.0, "2", turns=turns)])

    assert cli("samples").out.splitlines()[1:5] == [
        "      task  1+1=",
        "     model  <search>1</search>  (250.0 ms)",
        "    reward  +0.5",
        "      tool  error: no answer  (search, 1500.0 ms, timeout)",
    ]


def test_conversations_of_one_run_are_told_apart(cli: Cli, run: RunFolder) -> None:
    def said(who: str, text: str, segment: int) -> dict[str, Any]:
        return {"who": who, "text": text, "tool": "", "seconds": 0.0, "failure": "", "segment": segment}

    turns = [said("task", "play", 0), said("model", "north", 0), said("model", "south", 1)]
    write_samples(run.path, 10, [{**sample(1, 1.0, "", turns=turns), "text": "", "answer": ""}])

    # Of a game there is no answer, and none that would be right.
    assert cli("samples").out.splitlines()[1:] == [
        "      task  play  (conversation 1)",
        "     model  north  (conversation 1)",
        "     model  south  (conversation 2)",
    ]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("--order", "best"), ["1+1=", "0+1=", "2+1="]),
        (("--order", "worst", "-n", "1"), ["2+1="]),
        (("--at-least", "0.5"), ["0+1=", "1+1="]),
        (("--at-least", "0.1", "--at-most", "0.9"), ["0+1="]),
        (("--step", "1"), ["0+1="]),
    ],
)
def test_order_step_and_bounds(cli: Cli, run: RunFolder, arguments: tuple[str, ...], shown: list[str]) -> None:
    ended = cli("samples", run.path, *arguments)

    assert (ended.code, asked(ended.out)) == (0, shown)


def test_random_ones_are_all_in_another_order(cli: Cli, run: RunFolder) -> None:
    orders = {tuple(asked(cli("samples", "--order", "random").out)) for _ in range(40)}

    assert len(orders) > 1
    assert {tuple(sorted(order)) for order in orders} == {("0+1=", "1+1=", "2+1=")}


def test_data_is_of_its_contract(cli: Cli, run: RunFolder, contract: Callable[[str, str], Any]) -> None:
    data = contract("samples", cli("samples", "--order", "best", "-n", "2", "--json").out)

    assert (data["step"], [item["reward"] for item in data["samples"]]) == (10, [1.0, 0.5])


def test_unlikely_tokens_are_coloured(cli: Cli, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_cli.console.console.colored", lambda stream=None: True)

    ended = cli("samples", "--logprobs", "--at-least", "1")

    assert "\x1b[1;33m<eos>" in ended.out
    assert "\x1b[1;33m2" not in ended.out
    assert "yellow below -0.7, red below -3" in ended.err


def test_a_step_without_samples_and_a_run_without_any(cli: Cli, run: RunFolder) -> None:
    assert "steps with samples: 1, 10" in cli.fails(1, "samples", "--step", "7")

    bare = RunFolder.create(RunnerConfig(), "embodied")
    bare.end(RunStatus.FINISHED)
    assert "the run has no samples" in cli.fails(1, "samples", bare.path)


def test_rows_of_an_older_version_are_shown(rlinf: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = RunFolder.create(RunnerConfig(), "math")
    old = {"prompt": "1+1=", "text": "2", "answer": "2", "reward": 1.0, "turns": [{"text": "2"}]}
    write_samples(made.path, 1, [old, {"reward": 0.0}])
    made.end(RunStatus.FINISHED)

    out = rlinf.out("samples")
    assert "prompt 0, answer 0: reward 1 ()" in out
    assert "prompt 0, answer 0: reward 0 ()" in out
