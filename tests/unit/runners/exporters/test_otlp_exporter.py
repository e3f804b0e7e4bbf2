"""Spans and metrics of a run as an OTLP receiver gets them; one that is gone costs the run nothing."""

from __future__ import annotations

import logging
from collections.abc import Generator
from pathlib import Path

import pytest

from rlinf_core.process import tracing
from rlinf_core.process.tracing import Taken, TraceSpan
from rlinf_core.runners.exporters.metrics_backend import BackendSettings
from rlinf_core.runners.exporters.open_backends import open_backends
from rlinf_core.runners.metrics import MetricsWriter
from rlinf_core.runners.trace import TraceWriter
from tests.unit.runners.exporters.otlp_receiver import Receiver, received_spans, receiving, written_spans

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra `telemetry`")

from rlinf_core.runners.exporters.otlp_exporter import OTLPExporter

SECRET = "otlp-secret-0d1f"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Generator[Receiver]:
    with receiving() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.address)
        yield server


def settings(path: Path) -> BackendSettings:
    return BackendSettings(path, "project", "embodied-1", {"env": {"api_key": SECRET}})


def span(name: str, began: float = 100.0, kind: str = tracing.METHOD) -> TraceSpan:
    return TraceSpan(kind, name, began, 0.5, 7)


def test_spans_received_are_those_of_the_trace_file(receiver: Receiver, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with (
        MetricsWriter(tmp_path / "metrics.jsonl", open_backends(["otlp"], settings(tmp_path))) as metrics,
        TraceWriter(path, forward=metrics.add_spans) as trace,
    ):
        for rank in range(2):
            spans = [span("train"), span("send to env:0", 100.25, tracing.TRANSFER), span("wait", 101, tracing.WAIT)]
            trace.add(f"actor:{rank}", Taken(spans, 0))
        trace.add("driver", Taken([span(f"step {number}", number, "phase") for number in range(5000)], 0))
    assert received_spans(receiver) == pytest.approx(written_spans(path), abs=1e-4, rel=0)
    assert len(receiver.spans) == 5007


def test_run_is_one_trace_with_a_resource_per_process(receiver: Receiver, tmp_path: Path) -> None:
    exporter = OTLPExporter(settings(tmp_path))
    for process in ("actor:0", "actor:1", "driver"):
        exporter.add_spans(process, [span("one"), span("two")])
    exporter.close()
    (root,) = [item for _, item in receiver.spans if not item.parent_span_id]
    assert root.name == "embodied-1"
    assert {item.parent_span_id for _, item in receiver.spans} == {b"", root.span_id}
    assert {item.trace_id for _, item in receiver.spans} == {root.trace_id}
    identities = {item.span_id for _, item in receiver.spans}
    assert len(identities) == len(receiver.spans) == 7
    assert {len(identity) for identity in identities} == {8}
    resources = {(resource["service.name"], resource["service.instance.id"]) for resource, _ in receiver.spans}
    assert resources == {("actor", "actor:0"), ("actor", "actor:1"), ("driver", "driver")}
    assert {resource["rlinf.run"] for resource, _ in receiver.spans} == {"embodied-1"}


def test_spans_and_metrics_of_many_steps_go_together(receiver: Receiver, tmp_path: Path) -> None:
    exporter = OTLPExporter(settings(tmp_path), gather_seconds=60, flush_seconds=60)
    for number in range(20):
        exporter.add_spans(f"actor:{number}", [span("one"), span("two")])
        exporter.log(number, {"env/return": float(number)})
    exporter.close()
    assert len(receiver.spans) == 41
    returns = [value for name, _, value in receiver.gauges if name == "rlinf_env_return"]
    assert returns == list(range(20))
    # One of spans, one of numbers.
    assert len(receiver.headers) == 2


def test_metrics_have_the_names_of_prometheus(receiver: Receiver, tmp_path: Path) -> None:
    exporter = OTLPExporter(settings(tmp_path))
    exporter.log(3, {"env/return": 1.5, "eval/pass@1": 0.25})
    exporter.close()
    names = {"rlinf_step": 3.0, "rlinf_env_return": 1.5, "rlinf_eval_pass_at_1": 0.25}
    assert receiver.gauges == [(name, "embodied-1", value) for name, value in names.items()]


def test_no_secret_is_sent(receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=of-the-receiver")
    exporter = OTLPExporter(settings(tmp_path))
    exporter.add_spans("actor:0", [span("train")])
    exporter.log(1, {"env/return": 1.0})
    exporter.close()
    assert set(receiver.headers) == {"of-the-receiver"}
    sent = repr((receiver.spans, receiver.gauges))
    assert "actor:0" in sent
    assert SECRET not in sent
    assert "of-the-receiver" not in sent


def test_a_receiver_that_is_gone_costs_one_warning(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.status = 401
    exporter = OTLPExporter(settings(tmp_path), most_waiting=100)
    with caplog.at_level(logging.WARNING):
        for step in range(1000):
            exporter.add_spans("actor:0", [span("train")])
            exporter.log(step, {"env/return": 1.0})
        exporter.close()
    complaints = [record.getMessage() for record in caplog.records]
    assert [text.partition(" (")[0] for text in complaints if "401" in text] == [
        "the OTLP receiver does not take spans or metrics"
    ]
    assert complaints[-1] == "OTLP: 3001 spans and metrics were not sent; all are in the run folder"
    assert len(complaints) == 2


def test_a_receiver_that_never_answers_is_waited_for_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    exporter = OTLPExporter(settings(tmp_path), flush_seconds=0.01)
    exporter.add_spans("actor:0", [span("train")] * 3)
    exporter.close()
    assert "OTLP: 4 spans and metrics were not sent" in caplog.text
    exporter._thread.join(30)
    assert not exporter._thread.is_alive()
