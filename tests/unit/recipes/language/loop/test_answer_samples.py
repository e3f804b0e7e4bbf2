from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.language.loop.arrivals import write_samples
from rlinf_cli.report.samples import read_samples, sampled_steps
from rlinf_core.config.secrets import MASK
from rlinf_core.errors import RunError


def sample(**options: Any) -> dict[str, Any]:
    return {
        "slot": 0,
        "sample": 0,
        "prompt": "1+1=",
        "text": "2",
        "answer": "2",
        "reward": 1.0,
        "reason": "the same text",
        "finish_reason": "stop",
        "parts": {},
        "tokens": [5],
        "logprobs": [-0.1],
        "versions": [0],
        "pieces": ["2"],
        **options,
    }


def test_the_samples_of_a_step_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, [sample()])
    write_samples(tmp_path, 20, [sample(text="zwölf"), sample(reward=0.0)])

    assert sampled_steps(tmp_path) == [1, 20]
    assert read_samples(tmp_path, 1) == (1, [sample()])
    step, results = read_samples(tmp_path)
    assert (step, [result["text"] for result in results]) == (20, ["zwölf", "2"])
    assert [path.name for path in (tmp_path / "samples").iterdir() if path.name.startswith(".")] == []


def test_secrets_of_the_environment_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-123456")
    spelled = sample(text="it is sk-123456", prompt="say sk-123456", tokens=[1, 2], pieces=["it is ", "sk-123456"])

    write_samples(tmp_path, 1, [spelled, sample()])

    assert "sk-123456" not in (tmp_path / "samples" / "step_1.jsonl").read_text()
    _, (masked, plain) = read_samples(tmp_path)
    assert (masked["text"], masked["prompt"]) == (f"it is {MASK}", f"say {MASK}")
    assert (masked["tokens"], masked["pieces"], masked["logprobs"]) == ([], [], [])
    assert plain == sample()


def test_what_is_not_there_or_broken_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no samples"):
        read_samples(tmp_path)
    write_samples(tmp_path, 3, [sample()])
    with pytest.raises(RunError, match="step 4 has no samples"):
        read_samples(tmp_path, 4)
    (tmp_path / "samples" / "step_3.jsonl").write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        read_samples(tmp_path)
