"""A collector that keeps what it is sent, and the spans of `trace.json` to compare them with."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Receiver(ThreadingHTTPServer):
    """A collector that keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.lock = threading.Lock()
        self.spans: list[tuple[dict[str, str], Any]] = []
        self.gauges: list[tuple[str, str, float]] = []
        self.headers: list[str | None] = []
        self.status = 200

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answering(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            self.server.headers.append(self.headers.get("x-key"))
            if self.path == "/v1/traces":
                for part in ExportTraceServiceRequest.FromString(body).resource_spans:
                    resource = {item.key: item.value.string_value for item in part.resource.attributes}
                    self.server.spans += [(resource, span) for scope in part.scope_spans for span in scope.spans]
            else:
                for part in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                    for metric in part.scope_metrics[0].metrics:
                        for point in metric.gauge.data_points:
                            run = point.attributes[0].value.string_value
                            self.server.gauges.append((metric.name, run, point.as_double))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def receiving() -> Generator[Receiver]:
    """Serve a receiver on loopback."""
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def written_spans(path: Path) -> dict[str, float]:
    """Return the spans of `trace.json` by process, kind and name: their number, first begin and total, in seconds."""
    events = json.loads(path.read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    spans: list[tuple[str, float, float]] = []
    for event in events:
        if event["ph"] in ("X", "b"):
            microseconds = event["dur"] if event["ph"] == "X" else ends[event["id"]] - event["ts"]
            label = f"{names[event['pid']]} {event['cat']} {event['name']}"
            spans.append((label, event["ts"] / 1e6, microseconds / 1e6))
    return _figures(spans)


def received_spans(receiver: Receiver) -> dict[str, float]:
    """Return those that were received below the root, alike."""
    spans: list[tuple[str, float, float]] = []
    for resource, item in receiver.spans:
        if item.parent_span_id:
            began, ended = item.start_time_unix_nano / 1e9, item.end_time_unix_nano / 1e9
            kind = next(value.value.string_value for value in item.attributes if value.key == "rlinf.kind")
            spans.append((f"{resource['service.instance.id']} {kind} {item.name}", began, ended - began))
    return _figures(spans)


def _figures(spans: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for label, began, seconds in spans:
        figures[f"{label}: number"] = figures.get(f"{label}: number", 0) + 1
        figures[f"{label}: first"] = min(began, figures.get(f"{label}: first", began))
        figures[f"{label}: total"] = figures.get(f"{label}: total", 0.0) + seconds
    return figures
