"""Spans and metrics of a run for an OpenTelemetry collector: `otlp` in `runner.logger.logger_backends`."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import blake2b, sha256
from importlib import import_module
from threading import Condition, Thread
from typing import Any, Final, NamedTuple

from rlinf_core.config.secrets import mask_message
from rlinf_core.process.tracing import TraceSpan
from rlinf_core.runners.exporters.metrics_backend import BackendSettings, MetricsBackend
from rlinf_core.runners.exporters.prometheus_exporter import metric_name
from rlinf_core.version import __version__

LOGGER = logging.getLogger("rlinf")
_SDK_LOGGER: Final = "opentelemetry.exporter"
_DRIVER: Final = "driver"
# Spans and numbers that wait for the receiver; about 20 MB. Beyond them the oldest are dropped.
_MOST_WAITING: Final = 100_000
_MOST_IN_A_REQUEST: Final = 2000
_FLUSH_SECONDS: Final = 3.0
_GATHER_SECONDS: Final = 2.0
_NANO: Final = 1_000_000_000


class _Spans(NamedTuple):
    """Spans of one process that wait."""

    process: str
    items: Sequence[TraceSpan]


class _Numbers(NamedTuple):
    """Gauges of one moment (seconds since 1970) that wait."""

    time: float
    items: Sequence[tuple[str, float]]


class OTLPExporter(MetricsBackend):
    """Sends each step's metrics, and the spans of a traced run, by OTLP over HTTP.

    The receiver and its credentials are those of the standard variables (`OTEL_EXPORTER_OTLP_ENDPOINT`,
    `OTEL_EXPORTER_OTLP_HEADERS`); by default `http://localhost:4318`. The run is one trace with the run as its root;
    each process is a resource, whose `service.name` is its group. Metrics have the names that Prometheus is served.

    A thread sends. A receiver that is slow or gone costs one warning and the data that do not fit into the queue.

    Args:
        settings: the run.
        most_waiting: spans and numbers in the queue.
        flush_seconds: the longest wait of `close`.
        gather_seconds: how long spans wait for others to be sent with.
    """

    def __init__(
        self,
        settings: BackendSettings,
        *,
        most_waiting: int = _MOST_WAITING,
        flush_seconds: float = _FLUSH_SECONDS,
        gather_seconds: float = _GATHER_SECONDS,
    ) -> None:
        self._otel = _Encoder(settings)
        self._most_waiting = most_waiting
        self._flush_seconds = flush_seconds
        self._gather_seconds = gather_seconds
        self._began = time.time()
        self._queue: deque[_Spans | _Numbers] = deque()
        self._waiting = 0
        self._dropped = 0
        self._changed = Condition()
        self._closing = False
        self._failing = False
        http = "opentelemetry.exporter.otlp.proto.http"
        self._spans: Any = import_module(f"{http}.trace_exporter").OTLPSpanExporter()
        self._numbers: Any = import_module(f"{http}.metric_exporter").OTLPMetricExporter()
        self._complaints = _OneWarning()
        self._complaints.install()
        self._thread = Thread(target=self._send_all, name="otlp", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        gauges = [("rlinf_step", float(step)), *((metric_name(name), value) for name, value in metrics.items())]
        self._put(_Numbers(time.time(), gauges))

    def add_spans(self, process: str, spans: Sequence[TraceSpan]) -> None:
        for start in range(0, len(spans), _MOST_IN_A_REQUEST):
            self._put(_Spans(process, spans[start : start + _MOST_IN_A_REQUEST]))

    def close(self) -> None:
        self._put(_Spans("", [TraceSpan("run", self._otel.run, self._began, time.time() - self._began, 0)]))
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        # A receiver that does not answer is not waited for at the end.
        self._thread.join(0.0 if self._failing else self._flush_seconds)
        with self._changed:
            lost = self._dropped + self._waiting
            self._queue.clear()
        if lost:
            LOGGER.warning("OTLP: %d spans and metrics were not sent; all are in the run folder", lost)
        self._spans.shutdown()
        self._numbers.shutdown()
        if not self._thread.is_alive():
            self._complaints.uninstall()

    def _put(self, part: _Spans | _Numbers) -> None:
        with self._changed:
            self._queue.append(part)
            self._waiting += len(part.items)
            while self._waiting > self._most_waiting:
                lost = len(self._queue.popleft().items)
                self._waiting -= lost
                self._dropped += lost
            self._changed.notify_all()

    def _send_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                # A request takes longer than its spans: those of all processes and of short steps go together.
                self._changed.wait_for(
                    lambda: self._closing or self._waiting >= _MOST_IN_A_REQUEST, self._gather_seconds
                )
                parts = self._next_parts()
            if not parts:
                return
            sent = self._send(parts)
            with self._changed:
                count = sum(len(part.items) for part in parts)
                self._waiting -= count
                self._dropped += 0 if sent else count
                self._failing = not sent

    def _next_parts(self) -> list[_Spans | _Numbers]:
        """Take what goes into one request from the queue: the numbers of one moment, or spans."""
        parts: list[_Spans | _Numbers] = []
        room = _MOST_IN_A_REQUEST
        while self._queue and (not parts or (isinstance(self._queue[0], _Spans) and len(self._queue[0].items) <= room)):
            parts.append(self._queue.popleft())
            room = room - len(parts[-1].items) if isinstance(parts[-1], _Spans) else 0
        return parts

    def _send(self, parts: Sequence[_Spans | _Numbers]) -> bool:
        first = parts[0]
        if isinstance(first, _Numbers):
            result = self._numbers.export(self._otel.metrics(first))
        else:
            spans = [span for part in parts if isinstance(part, _Spans) for span in self._otel.spans(part)]
            result = self._spans.export(spans)
        return result.name == "SUCCESS"


class _Encoder:
    """Makes the values of the OpenTelemetry SDK. W3C ids are hashes of run, process and number.

    Args:
        settings: the settings of the run; a run that is resumed in its folder goes on in its trace.
    """

    def __init__(self, settings: BackendSettings) -> None:
        self.run = settings.name
        self._project = settings.project
        self._trace_api: Any = import_module("opentelemetry.trace")
        self._trace: Any = import_module("opentelemetry.sdk.trace")
        self._metrics: Any = import_module("opentelemetry.sdk.metrics.export")
        self._resource_type: Any = import_module("opentelemetry.sdk.resources").Resource
        scope_type: Any = import_module("opentelemetry.sdk.util.instrumentation").InstrumentationScope
        self._scope = scope_type("rlinf", __version__)
        self._resources: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._trace_id = int.from_bytes(sha256(str(settings.folder.absolute()).encode()).digest()[:16], "big")
        # Another process of the same run numbers its spans from the start.
        self._prefix = f"{self._trace_id}/{time.time_ns()}"
        self._root = self._context("")

    def spans(self, part: _Spans) -> list[Any]:
        """Return spans; those of the process `""` are the root."""
        resource = self._resource(part.process or _DRIVER)
        return [
            self._trace.ReadableSpan(
                span.name,
                context=self._context(part.process) if part.process else self._root,
                parent=self._root if part.process else None,
                resource=resource,
                attributes={"rlinf.kind": span.kind, "rlinf.task": span.task_key},
                start_time=int(span.began * _NANO),
                end_time=int((span.began + span.seconds) * _NANO),
                instrumentation_scope=self._scope,
            )
            for span in part.items
        ]

    def metrics(self, part: _Numbers) -> Any:
        """Return gauges of the driver with the attribute `run`, as the label of Prometheus."""
        at, export = int(part.time * _NANO), self._metrics
        metrics = [
            export.Metric(name, "", "", export.Gauge([export.NumberDataPoint({"run": self.run}, at, at, value)]))
            for name, value in part.items
        ]
        scope = export.ScopeMetrics(self._scope, metrics, "")
        return export.MetricsData([export.ResourceMetrics(self._resource(_DRIVER), [scope], "")])

    def _context(self, process: str) -> Any:
        number = self._counts[process] = self._counts.get(process, 0) + 1
        digest = blake2b(f"{self._prefix}/{process}/{number}".encode(), digest_size=8).digest()
        return self._trace_api.SpanContext(
            self._trace_id,
            int.from_bytes(digest, "big"),
            is_remote=False,
            trace_flags=self._trace_api.TraceFlags(self._trace_api.TraceFlags.SAMPLED),
        )

    def _resource(self, process: str) -> Any:
        """Return the resource of a process such as `actor:0`; it holds names only, no configuration."""
        if process not in self._resources:
            self._resources[process] = self._resource_type.create(
                {
                    "service.namespace": self._project,
                    "service.name": process.partition(":")[0],
                    "service.instance.id": process,
                    "rlinf.run": self.run,
                }
            )
        return self._resources[process]


class _OneWarning(logging.Handler):
    """Turns the first complaint of the SDK into a warning of ours, and drops the rest."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._logger = logging.getLogger(_SDK_LOGGER)
        self._propagated = self._logger.propagate
        self._warned = False

    def install(self) -> None:
        """Take the place of the handlers above."""
        self._logger.addHandler(self)
        self._logger.propagate = False

    def uninstall(self) -> None:
        """Give it back."""
        self._logger.removeHandler(self)
        self._logger.propagate = self._propagated

    def emit(self, record: logging.LogRecord) -> None:
        if not self._warned:
            self._warned = True
            LOGGER.warning(
                "the OTLP receiver does not take spans or metrics (%s); the run goes on without it, and all are in its"
                " folder. The address is that of OTEL_EXPORTER_OTLP_ENDPOINT, http://localhost:4318 by default",
                mask_message(record.getMessage()),
            )
