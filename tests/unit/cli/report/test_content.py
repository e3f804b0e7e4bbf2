"""Content of a report: which of many samples it shows."""

from __future__ import annotations

from pathlib import Path

from recipes.language.loop.arrivals import write_samples
from rlinf_cli.report.content import gather
from tests.unit.cli.report_runs import empty_run


def test_the_best_and_worst_samples_are_of_different_prompts(tmp_path: Path) -> None:
    run = empty_run(str(tmp_path))
    answers = [(prompt, 1.0) for prompt in "abcdefghij" for _ in range(4)]
    answers += [(prompt, 0.0) for prompt in "klmnopqrst" for _ in range(4)]
    write_samples(
        run.path,
        1,
        [{"prompt": prompt, "text": "", "answer": "", "reward": reward, "reason": ""} for prompt, reward in answers],
    )
    shown = gather(run).samples
    assert [item.reward for item in shown] == [1.0] * 8 + [0.0] * 8
    assert len({item.prompt for item in shown}) == 16
