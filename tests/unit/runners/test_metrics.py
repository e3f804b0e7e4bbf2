"""`metrics.jsonl`: one line for each step, whatever happens to the process that writes it."""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_core.errors import RunError
from rlinf_core.runners.exporters import MetricsBackend
from rlinf_core.runners.metrics import MetricsWriter, read_metrics


class Memory(MetricsBackend):
    def __init__(self) -> None:
        self.seen: list[object] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.seen.append((step, dict(metrics)))

    def rewind(self, step: int) -> None:
        self.seen.append(f"rewind {step}")

    def close(self) -> None:
        self.seen.append("closed")


def test_each_step_is_one_object(tmp_path: Path) -> None:
    path, memory = tmp_path / "metrics.jsonl", Memory()
    with MetricsWriter(path, [memory]) as writer:
        writer.log(1, {"env/return": 3.5, "time/step": 1})
        lines = path.read_text().splitlines()
        assert len(lines) == 1
        data = json.loads(lines[0])
        assert set(data) == {"step", "time", "metrics"}
        assert data["step"] == 1
        assert data["metrics"] == {"env/return": 3.5, "time/step": 1.0}
        writer.log(2, {"env/return": 4.25})
        writer.log(2, {"eval/return": 5, "env/return": 4})
        assert writer.newest_up_to(9) == {"env/return": 4.0, "time/step": 1.0, "eval/return": 5.0}
    assert [(line.step, dict(line.metrics)) for line in read_metrics(path)] == [
        (1, {"env/return": 3.5, "time/step": 1.0}),
        (2, {"env/return": 4.0, "eval/return": 5.0}),
    ]
    assert memory.seen[-2:] == [(2, {"eval/return": 5.0, "env/return": 4.0}), "closed"]


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.log(1, {"loss": math.inf, "norm": math.nan, "lr": 0.5})
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["metrics"] == {
        "loss": None,
        "norm": None,
        "lr": 0.5,
    }
    assert math.isnan(read_metrics(path)[0].metrics["loss"])


def test_steps_come_in_order(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.log(2, {})
        with pytest.raises(ValueError, match="step 1 come after those of step 2"):
            writer.log(1, {})


def test_it_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="metrics cannot be written"):
        MetricsWriter(tmp_path / "missing" / "metrics.jsonl")


@contextmanager
def without_room(size: int) -> Iterator[None]:
    """Let this process's files grow to so many bytes and no further, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_lines_without_room_are_written_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.log(1, {"a": 1.0})
    size = path.stat().st_size
    with without_room(size + 10):
        writer.log(2, {"a": 2.0})
        writer.log(3, {"a": 3.0})
    assert path.stat().st_size == size
    (warning,) = [record.getMessage() for record in caplog.records]
    start = f"metrics cannot be written to {path}, and are kept in memory: File too large: the disk has "
    assert warning.startswith(start)
    assert writer.newest_up_to(3) == {"a": 3.0}
    writer.log(3, {"b": 4.0})
    assert [(line.step, line.metrics) for line in read_metrics(path)] == [
        (1, {"a": 1.0}),
        (2, {"a": 2.0}),
        (3, {"a": 3.0, "b": 4.0}),
    ]


def test_lines_that_never_had_room_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    with without_room(0):
        writer.log(4, {"a": 1.0})
        writer.close()
    assert "the metrics of the steps 4 to 4 are not in" in caplog.text


actions = st.one_of(
    st.tuples(st.just("log"), st.integers(0, 2), st.dictionaries(st.sampled_from("abc"), st.floats(), max_size=3)),
    st.tuples(st.just("full"), st.integers(0, 2), st.integers(0, 300)),
    st.tuples(st.just("rewind"), st.integers(0, 8)),
    st.tuples(st.just("reopen"), st.integers(0, 60)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(actions, max_size=12))
def test_the_file_is_always_what_was_logged(tmp_path_factory: pytest.TempPathFactory, story: list[tuple]) -> None:
    """Against a dictionary: logging, also without room, going back, and being killed in the middle of a line."""
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    writer = MetricsWriter(path)
    expected: dict[int, dict[str, float]] = {}
    behind = False
    for action, *rest in story:
        behind = action == "full" or (behind and action == "rewind")
        if action == "full":
            step = max(expected, default=0) + rest[0]
            with without_room(rest[1]):
                writer.log(step, {"a": 1.0})
            expected.setdefault(step, {}).update(a=1.0)
        elif action == "log":
            step = max(expected, default=0) + rest[0]
            writer.log(step, rest[1])
            expected.setdefault(step, {}).update(rest[1])
        elif action == "rewind":
            writer.rewind(rest[0])
            expected = {step: metrics for step, metrics in expected.items() if step <= rest[0]}
        else:
            writer.close()
            with path.open("ab") as file:
                file.write(b'{"step": 99, "time": 1.0, "metrics": {"a": 1.0, "b": 2.0}}\n'[: rest[0] % 58])
            writer = MetricsWriter(path)
        results = {line.step: dict(line.metrics) for line in read_metrics(path)}
        assert set(results) <= set(expected)
        assert behind or list(results) == sorted(expected)
        assert behind or repr(results) == repr(_finite(dict(sorted(expected.items())), results))
        assert all(json.loads(line) for line in path.read_text().splitlines())
    writer.close()


def _finite(expected: dict[int, dict[str, float]], actual: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    return {
        step: {name: metrics[name] if math.isfinite(metrics[name]) else math.nan for name in actual[step]}
        for step, metrics in expected.items()
        if set(metrics) == set(actual[step])
    }
