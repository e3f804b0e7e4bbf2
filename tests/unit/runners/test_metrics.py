"""Metrics of steps: their file, and services that are told of them once."""

from __future__ import annotations

import json
import logging
import math
import resource
import socket
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.request import urlopen

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from rlinf_core.config.diagnostics import Diagnostic, Severity
from rlinf_core.config.sections.runner import LOGGER_MODULES
from rlinf_core.errors import ConfigError, RunError
from rlinf_core.job.load import load_job
from rlinf_core.runners.exporters import BACKENDS, BackendSettings, MetricsBackend, PrometheusExporter, open_backends
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


TRACKERS = ("wandb", "swanlab", "trackio")


def backend_settings(path: Path, *, resumed: bool = False) -> BackendSettings:
    return BackendSettings(path, "rlinf", "embodied-1", {"runner": {"max_steps": 3}}, resumed)


class Service(ModuleType):
    """Stands for wandb and its like: remembers what it is told."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.messages: list[Any] = []

    def init(self, **arguments: Any) -> None:
        self.messages.append(arguments)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.messages.append((step, metrics))

    def finish(self) -> None:
        self.messages.append("finished")


@pytest.mark.parametrize("name", TRACKERS)
def test_a_service_is_told_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    service = Service(name)
    monkeypatch.setitem(sys.modules, name, service)
    (backend,) = open_backends([name], backend_settings(tmp_path))
    for step in (1, 2, 3):
        backend.log(step, {"env/return": step})
    # After a restart steps 2 and 3 come again; services take no step twice.
    backend.rewind(1)
    for step in (2, 3, 4):
        backend.log(step, {"env/return": step})
    backend.close()
    arguments, *output = service.messages
    assert arguments["project"] == "rlinf"
    assert arguments["name"] == "embodied-1"
    assert arguments["config"] == {"runner": {"max_steps": 3}}
    assert output == [*((step, {"env/return": step}) for step in (1, 2, 3, 4)), "finished"]


@pytest.mark.parametrize(("name", "first"), [("wandb", 4), ("trackio", 4), ("swanlab", 2)])
def test_resumed_metrics_service_gets_no_step_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, first: int
) -> None:
    service = Service(name)
    monkeypatch.setitem(sys.modules, name, service)
    # The process before had told of three steps, and its checkpoint was of the first. SwanLab begins anew.
    resumed = backend_settings(tmp_path, resumed=True)._replace(known=3)
    (backend,) = open_backends([name], resumed)
    backend.rewind(1)
    for step in (2, 3, 4, 5):
        backend.log(step, {"env/return": step})
    _, *output = service.messages
    assert [step for step, _ in output] == list(range(first, 6))


def test_mlflow_gets_a_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service("mlflow")
    calls: list[Any] = []
    for name in ("set_experiment", "start_run", "log_dict", "log_metrics", "end_run"):
        monkeypatch.setattr(
            service, name, lambda *values, _name=name, **named: calls.append((_name, *values, named)), raising=False
        )
    monkeypatch.setitem(sys.modules, "mlflow", service)
    (backend,) = open_backends(["mlflow"], backend_settings(tmp_path))
    for step in (1, 2):
        backend.log(step, {"eval/pass@1": 0.5})
    backend.rewind(1)
    backend.log(2, {"eval/pass@1": 0.5})
    backend.close()
    assert calls == [
        ("set_experiment", "rlinf", {}),
        ("start_run", {"run_name": "embodied-1"}),
        ("log_dict", {"runner": {"max_steps": 3}}, "config.json", {}),
        ("log_metrics", {"eval/pass_at_1": 0.5}, {"step": 1}),
        ("log_metrics", {"eval/pass_at_1": 0.5}, {"step": 2}),
        ("end_run", {}),
    ]


def test_missing_package_is_named_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service("wandb")
    monkeypatch.setitem(sys.modules, "wandb", service)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: service.__spec__ if name == "wandb" else None)
    with pytest.raises(ConfigError, match="needs `trackio`") as raised:
        open_backends(["wandb", "trackio"], backend_settings(tmp_path))
    assert f"{sys.executable} -m pip install 'trackio>=" in str(raised.value)
    assert service.messages == []


def test_an_unknown_backend(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown logger backend `wandbb`") as raised:
        open_backends(["wandbb"], backend_settings(tmp_path))
    assert "did you mean `wandb`" in str(raised.value)


def test_one_that_does_not_start_takes_the_others_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fine, broken = Service("wandb"), Service("trackio")

    def refuse(**_: Any) -> None:
        raise ConnectionError("no login")

    monkeypatch.setattr(broken, "init", refuse)
    for service in (fine, broken):
        monkeypatch.setitem(sys.modules, service.__name__, service)
    with pytest.raises(RunError, match="`trackio` does not start") as raised:
        open_backends(["wandb", "trackio"], backend_settings(tmp_path))
    assert "no login" in str(raised.value)
    assert fine.messages[-1] == "finished"


def test_a_service_that_fails_later_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Flaky(MetricsBackend):
        messages = 0

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            self.messages += 1
            raise ConnectionError("the network is gone")

        def close(self) -> None:
            raise AssertionError("it was left out")

    flaky = Flaky()
    with caplog.at_level(logging.WARNING), MetricsWriter(tmp_path / "metrics.jsonl", [flaky]) as writer:
        writer.log(1, {"a": 1})
        writer.log(2, {"a": 2})
    assert flaky.messages == 1
    assert caplog.text.count("Flaky gets no more metrics (ConnectionError: the network is gone)") == 1
    assert [line.step for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_tensorboard_has_a_file_for_each_active_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            output.append((Path(folder).name, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            output.append((name, value, step))

        def flush(self) -> None:
            return

        def close(self) -> None:
            output.append("closed")

    module: Any = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    (backend,) = open_backends(["tensorboard"], backend_settings(tmp_path))
    # As a run that begins does it, then goes back to step 1 and dies at once, twice.
    backend.rewind(0)
    backend.log(1, {"a": 1.0})
    backend.log(2, {"a": 2.0})
    backend.rewind(1)
    backend.rewind(1)
    backend.log(2, {"a": 3.0})
    backend.close()
    assert output == [
        *(("tensorboard", 1), ("a", 1.0, 1), ("a", 2.0, 2), "closed"),
        *(("tensorboard", 2), ("a", 3.0, 2), "closed"),
    ]


def test_tensorboard_hides_what_a_restart_does_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("torch")
    (backend,) = open_backends(["tensorboard"], backend_settings(tmp_path))
    for step in (1, 2, 3):
        backend.log(step, {"env/return": float(step)})
    backend.rewind(1)
    backend.log(2, {"env/return": 20.0})
    backend.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("env/return")] == [(1, 1.0), (2, 20.0)]


def test_validate_knows_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = _missing(monkeypatch, "wandb", "runner.logger.logger_backends=[wandb]")
    assert missing.path == ("runner", "logger", "logger_backends", 0)
    assert missing.help is not None
    assert f"{sys.executable} -m pip install 'wandb>=0.17'`, which is the extra `rlinf-cli[wandb]`" in missing.help


def test_validate_names_the_package_of_the_metrics_port(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = _missing(monkeypatch, "prometheus_client", "runner.metrics_port=9400")
    assert missing.path == ("runner", "metrics_port")
    assert "prometheus-client" in (missing.help or "")


def _missing(monkeypatch: pytest.MonkeyPatch, module: str, override: str) -> Diagnostic:
    """Return the finding about a missing module."""
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == module else real(name, *rest))
    job = load_job("embodied/pick-laptop", [override])
    (finding,) = [diagnostic for diagnostic in job.diagnostics if diagnostic.code == "missing-extra"]
    return finding


def test_a_removed_backend_is_refused_with_a_remedy() -> None:
    job = load_job("embodied/pick-laptop", ["runner.logger.logger_backends=[tensorboard,otlp]"])
    (finding,) = [diagnostic for diagnostic in job.diagnostics if diagnostic.severity is Severity.ERROR]
    assert finding.path == ("runner", "logger", "logger_backends")
    assert "`otlp`" in finding.message
    assert "`runner.metrics_port`" in (finding.help or "")


def test_every_backend_has_its_package_and_class() -> None:
    assert set(LOGGER_MODULES) == set(BACKENDS)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def exporter(tmp_path: Path) -> Generator[PrometheusExporter]:
    exporter = PrometheusExporter(BackendSettings(tmp_path, "rlinf", "embodied-1", {}), free_port())
    yield exporter
    exporter.close()


def scraped(exporter: PrometheusExporter) -> dict[str, float]:
    with urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} == {"embodied-1"}
    return {sample.name: sample.value for sample in samples}


def test_the_newest_value_of_each_metric_is_served(exporter: PrometheusExporter) -> None:
    exporter.log(1, {"env/return": 1.5, "eval/pass@1": 0.25})
    exporter.log(2, {"env/return": 2.5, "train/actor/grad_norm": math.nan})
    values = scraped(exporter)
    assert math.isnan(values.pop("rlinf_train_actor_grad_norm"))
    assert values.pop("rlinf_step_timestamp_seconds") > 1.7e9
    assert values == {"rlinf_step": 2, "rlinf_env_return": 2.5, "rlinf_eval_pass_at_1": 0.25}
    exporter.rewind(1)
    assert scraped(exporter)["rlinf_step"] == 1


def test_no_step_has_ended_before_the_first_log(exporter: PrometheusExporter) -> None:
    assert scraped(exporter)["rlinf_step"] == 0


def test_only_loopback_listens(exporter: PrometheusExporter) -> None:
    assert exporter._server.server_address[0] == "127.0.0.1"


def test_a_taken_port_is_named(exporter: PrometheusExporter, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"metrics cannot be served at port {exporter.port}"):
        PrometheusExporter(BackendSettings(tmp_path, "rlinf", "other", {}), exporter.port)


def test_names_are_prometheus_names(exporter: PrometheusExporter) -> None:
    exporter.log(7, {"env/return": 1.0, "eval/my set/pass@8": 2.0, "1/ü": 3.0, "step": 0.5})
    assert scraped(exporter)["rlinf_step"] == 7
    assert {"rlinf_env_return", "rlinf_eval_my_set_pass_at_8", "rlinf_1"} <= set(scraped(exporter))
