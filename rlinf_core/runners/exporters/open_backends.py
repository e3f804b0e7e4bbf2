"""Metric services for `runner.logger.logger_backends`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from rlinf_core.config.sections.runner import LOGGER_MODULES
from rlinf_core.errors import ConfigError, RunError
from rlinf_core.process.requirements import install_command, missing_modules
from rlinf_core.runners.exporters.metrics_backend import BackendSettings, MetricsBackend
from rlinf_core.runners.exporters.otlp_exporter import OTLPExporter
from rlinf_core.runners.exporters.trackers import MLflow, SwanLab, TensorBoard, Trackio, WandB
from rlinf_core.suggest import did_you_mean, quoted

_BACKENDS: Final[Mapping[str, Callable[[BackendSettings], MetricsBackend]]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "swanlab": SwanLab,
    "trackio": Trackio,
    "mlflow": MLflow,
    "otlp": OTLPExporter,
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
            opened.append(_BACKENDS[name](settings))
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
    if name not in _BACKENDS:
        hint = did_you_mean(name, _BACKENDS) or f"known: {quoted(_BACKENDS)}"
        raise ConfigError(f"unknown logger backend `{name}`", where=where, help=hint)
    missing = missing_modules(LOGGER_MODULES[name])
    if missing:
        raise ConfigError(
            f"the logger backend `{name}` needs {quoted(missing)}, which this Python does not have",
            where=where,
            help=f"run `{install_command(*missing)}`, or remove it from the list",
        )
