"""Metrics of a run for Prometheus: `runner.metrics_port`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from threading import Lock
from typing import Any, Final

from rlinf_core.errors import RunError
from rlinf_core.runners.exporters.metrics_backend import BackendSettings, MetricsBackend

_LOOPBACK: Final = "127.0.0.1"
_UNSAFE: Final = re.compile(r"[^a-zA-Z0-9_]+")


class PrometheusExporter(MetricsBackend):
    """The newest value of each metric at `http://127.0.0.1:PORT/metrics`, in Prometheus' text format.

    `env/return` becomes the gauge `rlinf_env_return` with the label `run`. `rlinf_step` is the last finished step, and
    `rlinf_step_timestamp_seconds` when it ended, so that an alarm can detect a stalled run.

    Args:
        settings: the run.
        port: the port at loopback; other machines reach it through an agent or a tunnel, which also authenticates.

    Raises:
        RunError: the port is taken.
    """

    def __init__(self, settings: BackendSettings, port: int) -> None:
        client: Any = import_module("prometheus_client")
        core: Any = import_module("prometheus_client.core")
        self._family: Any = core.GaugeMetricFamily
        self._run = settings.name
        self._lock = Lock()
        self._step = max(0, settings.known)
        self._time = time.time()
        self._values: dict[str, tuple[str, float]] = {}
        registry = client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = client.start_http_server(port, addr=_LOOPBACK, registry=registry)
        except OSError as error:
            raise RunError(
                f"metrics cannot be served at port {port}",
                where="runner.metrics_port",
                why=error.strerror or str(error),
                help="choose a free port, for each of several runs another one",
            ) from error

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.server_address[1]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._step, self._time = step, time.time()
            for name, value in metrics.items():
                self._values[metric_name(name)] = (name, value)

    def rewind(self, step: int) -> None:
        with self._lock:
            self._step = step

    def collect(self) -> Iterator[Any]:
        """Return the families of gauges; Prometheus' client calls it for each scrape, in a thread of its own."""
        with self._lock:
            values = dict(self._values)
            own = {
                "rlinf_step": ("The last finished training step.", float(self._step)),
                "rlinf_step_timestamp_seconds": ("When it finished, in seconds since 1970.", self._time),
            }
        for name, (text, value) in {**own, **values}.items():
            family = self._family(name, text, labels=["run"])
            family.add_metric([self._run], value)
            yield family

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def metric_name(name: str) -> str:
    """Return the gauge of a metric: `rlinf_eval_pass_at_1` of `eval/pass@1`."""
    return f"rlinf_{_UNSAFE.sub('_', name.replace('@', '_at_')).strip('_')}"
