"""Metric services with a package of their own, as wandb has."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from rlinf_core.foreign.files import make_folder
from rlinf_core.runners.exporters.metrics_backend import BackendSettings, MetricsBackend


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
        # TensorBoard hides earlier files' data from this step on. A new run has a single file.
        self.close()
        self._purge_step = step + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class _Tracker(MetricsBackend):
    """A service whose module has `init`, `log` and `finish`, or the like.

    Their steps must increase, so repeated steps after a `rewind` are dropped until the run is past the logged ones.
    """

    module: str
    # Whether a resumed run continues its record in the service; else it starts a new one.
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
    """MLflow: the server of `MLFLOW_TRACKING_URI`, or a local database. A resumed run is a new one there."""

    module = "mlflow"
    continues = False

    def _begin(self, settings: BackendSettings) -> None:
        self._module.set_experiment(settings.project)
        self._module.start_run(run_name=settings.name)
        self._module.log_dict(dict(settings.config), "config.json")

    def _send(self, step: int, metrics: Mapping[str, float]) -> None:
        # Its names have no `@`.
        self._module.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._module.end_run()
