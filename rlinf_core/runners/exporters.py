"""The services that get a run's metrics: trackers such as wandb (`runner.logger.logger_backends`), and Prometheus.

The package of a service is imported when the service is opened.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

from rlinf_core.config.sections.runner import LOGGER_MODULES
from rlinf_core.errors import ConfigError, RunError
from rlinf_core.foreign.files import make_folder
from rlinf_core.process.requirements import install_command, missing_modules
from rlinf_core.suggest import did_you_mean, quoted

_LOOPBACK: Final = "127.0.0.1"
_UNSAFE: Final = re.compile(r"[^a-zA-Z0-9_]+")


class BackendSettings(NamedTuple):
    """The facts about a run for a backend.

    Attributes:
        folder: the run folder, for files of the backend.
        project, name: the project and name of the run in the service.
        config: the resolved configuration without secrets, as plain data.
        resumed: whether the run resumes an earlier one.
        known: the last step that an earlier process of the run logged; -1 for none.
    """

    folder: Path
    project: str
    name: str
    config: Mapping[str, Any]
    resumed: bool = False
    known: int = -1


class MetricsBackend(ABC):
    """A service that receives metrics."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of `step`, numbers by name. A step may be logged in several parts."""

    def rewind(self, step: int) -> None:  # noqa: B027 - most services keep logged steps
        """Go back to `step`: later steps will be logged again."""

    @abstractmethod
    def close(self) -> None:
        """Flush pending data. Called once."""


class TensorBoard(MetricsBackend):
    """Event files in `tensorboard/` of the run folder."""

    def __init__(self, settings: BackendSettings) -> None:
        self._folder = settings.folder / "tensorboard"
        make_folder(self._folder)
        self._module: Any = import_module("torch.utils.tensorboard")
        self._purge_step: int | None = None
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._module.SummaryWriter(str(self._folder), purge_step=self._purge_step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def rewind(self, step: int) -> None:
        # A new file with `purge_step` makes TensorBoard hide the data of earlier files from that step on.
        self.close()
        self._purge_step = step + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class _Tracker(MetricsBackend):
    """A service whose module has `init`, `log` and `finish`, or similar functions.

    Its steps must increase, so repeated steps after a `rewind` are dropped until the run is past the logged ones.
    """

    module: str
    # Whether a resumed run continues its earlier record in the service; else it starts a new one.
    continues = True

    def __init__(self, settings: BackendSettings) -> None:
        self._module: Any = import_module(self.module)
        self._known = settings.known if settings.resumed and self.continues else -1
        self._replayed_until = -1
        self._begin(settings)

    def _begin(self, settings: BackendSettings) -> None:
        self._module.init(**self.arguments(settings))

    def arguments(self, settings: BackendSettings) -> dict[str, Any]:
        """Return the keyword arguments of the module's `init`."""
        raise NotImplementedError

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self._replayed_until:
            self._known = step
            self._send(step, metrics)

    def _send(self, step: int, metrics: Mapping[str, float]) -> None:
        self._module.log(dict(metrics), step=step)

    def rewind(self, step: int) -> None:
        self._replayed_until = self._known

    def close(self) -> None:
        self._module.finish()


class WandB(_Tracker):
    """Weights & Biases; offline if configured so."""

    module = "wandb"

    def arguments(self, settings: BackendSettings) -> dict[str, Any]:
        return {
            "project": settings.project,
            "name": settings.name,
            # The same run continues after a resume.
            "id": settings.name,
            "resume": "allow" if settings.resumed else "never",
            "dir": str(settings.folder),
            "config": dict(settings.config),
        }


class SwanLab(_Tracker):
    """SwanLab; local if configured so."""

    module = "swanlab"
    continues = False

    def arguments(self, settings: BackendSettings) -> dict[str, Any]:
        return {
            "project": settings.project,
            "name": settings.name,
            "log_dir": str(settings.folder / "swanlab"),
            "config": dict(settings.config),
        }


class Trackio(_Tracker):
    """Trackio, with a local database."""

    module = "trackio"

    def arguments(self, settings: BackendSettings) -> dict[str, Any]:
        return {
            "project": settings.project,
            "name": settings.name,
            "resume": "allow" if settings.resumed else "never",
            "config": dict(settings.config),
        }


class MLflow(_Tracker):
    """MLflow: the server of `MLFLOW_TRACKING_URI`, or a local database. A resumed run is a new run there."""

    module = "mlflow"
    continues = False

    def _begin(self, settings: BackendSettings) -> None:
        self._module.set_experiment(settings.project)
        self._module.start_run(run_name=settings.name)
        self._module.log_dict(dict(settings.config), "config.json")

    def _send(self, step: int, metrics: Mapping[str, float]) -> None:
        # MLflow does not allow `@` in names.
        self._module.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._module.end_run()


class PrometheusExporter(MetricsBackend):
    """The newest value of each metric at `http://127.0.0.1:PORT/metrics`, in Prometheus' text format.

    `env/return` becomes the gauge `rlinf_env_return` with the label `run`. `rlinf_step` is the last finished step, and
    `rlinf_step_timestamp_seconds` when it ended, so that an alarm can detect a stalled run.

    Args:
        settings: the run.
        port: the port at loopback; other machines need an agent or a tunnel, which also authenticates.

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
        """The port on which it listens."""
        return self._server.server_address[1]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._step, self._time = step, time.time()
            for name, value in metrics.items():
                self._values[_gauge_name(name)] = (name, value)

    def rewind(self, step: int) -> None:
        with self._lock:
            self._step = step

    def collect(self) -> Iterator[Any]:
        """Yield the families of gauges; Prometheus' client calls this for each scrape, in its own thread."""
        with self._lock:
            values = dict(self._values)
            own = {
                "rlinf_step": ("The last finished training step.", float(self._step)),
                "rlinf_step_timestamp_seconds": ("When it finished, in seconds since 1970.", self._time),
            }
        for name, (text, value) in {**values, **own}.items():
            family = self._family(name, text, labels=["run"])
            family.add_metric([self._run], value)
            yield family

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _gauge_name(name: str) -> str:
    """Return the name of a metric's gauge: `rlinf_eval_pass_at_1` for `eval/pass@1`."""
    return f"rlinf_{_UNSAFE.sub('_', name.replace('@', '_at_')).strip('_')}"


BACKENDS: Final[Mapping[str, Callable[[BackendSettings], MetricsBackend]]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "swanlab": SwanLab,
    "trackio": Trackio,
    "mlflow": MLflow,
}


def open_backends(names: Sequence[str], settings: BackendSettings) -> list[MetricsBackend]:
    """Return the backends of these names, ready for logging.

    Raises:
        ConfigError: one is unknown, or its package is not installed.
        RunError: one cannot be started, for example without a login.
    """
    for name in names:
        check_backend(name)
    opened: list[MetricsBackend] = []
    for name in names:
        try:
            opened.append(BACKENDS[name](settings))
        except Exception as error:
            for backend in opened:
                with suppress(Exception):
                    backend.close()
            raise RunError(
                f"the logger backend `{name}` does not start",
                where="runner.logger.logger_backends",
                why=f"{type(error).__name__}: {error}",
                help="fix its settings, or remove it from the list; `metrics.jsonl` is always written",
            ) from error
    return opened


def check_backend(name: str) -> None:
    """Check that a backend can be imported, without importing it.

    Raises:
        ConfigError: it is unknown, or its package is not installed; `help` has the pip command.
    """
    where = "runner.logger.logger_backends"
    if name not in BACKENDS:
        hint = did_you_mean(name, BACKENDS) or f"known: {quoted(BACKENDS)}"
        raise ConfigError(f"unknown logger backend `{name}`", where=where, help=hint)
    missing = missing_modules(LOGGER_MODULES[name])
    if missing:
        raise ConfigError(
            f"the logger backend `{name}` needs {quoted(missing)}, which this Python does not have",
            where=where,
            help=f"run `{install_command(*missing)}`, or remove it from the list",
        )
