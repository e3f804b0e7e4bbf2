"""The record of a run started by a program without `rlinf train`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self, cast

from rlinf_core.config.composing.origins import default_origins, plain_data, yaml_of
from rlinf_core.config.secrets import MASK, environment_secrets, is_secret, mask_urls, url_secrets
from rlinf_core.config.sections.runner import RunSettings
from rlinf_core.errors import ConfigError, RLinfError
from rlinf_core.job.find_recipe import recipe_of
from rlinf_core.job.recipe import Recipe
from rlinf_core.process.known_secrets import hidden, remember
from rlinf_core.runners import events
from rlinf_core.runners.events import Event
from rlinf_core.runners.record import RunConfig, RunRecord, facts_of
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_status import RunStatus
from rlinf_core.suggest import escaped

# Seconds between progress lines, which are also those between writes of the step to the folder.
_EVERY: Final = 5.0


class StandaloneRecord(RunRecord):
    """A record with its own new run folder, whose state it keeps up to date until closed.

    Progress is printed to standard error every few seconds.
    """

    _closed = False

    @classmethod
    def create(cls, config: RunConfig) -> Self:
        """Return the record of a new run.

        In the folder's `config.yaml`, the values of keys and environment variables with secret-looking names are
        masked.

        Raises:
            CheckpointError: there is no complete checkpoint at `runner.resume_dir`, or it does not match.
            RunError: the folder cannot be written, or the run to resume is still active.
            ConfigError: `config` is not that of a job, or a metrics service needs a package that is not installed.
        """
        if not isinstance(getattr(config, "runner", None), RunSettings):
            message = f"a `{type(config).__name__}` is not the configuration of a job"
            raise ConfigError(message, help="load the file by `load_job`, and pass its `config`")
        save_path = getattr(getattr(config, "actor", None), "checkpoint_save_path", None)
        recipe = _recipe(config)
        plain = _masked(plain_data(config))
        text = yaml_of(default_origins(plain))
        name = config.recipe if recipe is None else recipe.name
        folder = RunFolder.create(config.runner, name, save_path, facts_of(recipe, config), text)
        reporter = _Reporter(folder)
        try:
            digest = folder.write_config_text(text)
            record = cls._opened(folder, reporter.on_event, config, recipe, digest, plain)
        except BaseException as error:
            _end(folder, error)
            raise
        reporter.say(f"run folder: {folder.path}")
        return record

    def close(self, error: BaseException | None = None) -> None:
        """Record how the run ended. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if error is None:
            self.finished()
        super().__exit__(None, None, None)
        self.folder.update(step=self.step)
        _end(self.folder, error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)


class _Reporter:
    """A listener that prints progress to standard error, and writes the step to the folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._next = 0.0
        self._last_step: int | None = None

    def say(self, text: str) -> None:
        print(escaped(hidden(text)), file=sys.stderr, flush=True)

    def on_event(self, event: Event) -> None:
        match event:
            case events.RunStarted():
                self._last_step = event.last_step
            case events.StepFinished():
                now = time.monotonic()
                if now >= self._next or event.step == self._last_step:
                    self._next = now + _EVERY
                    self._folder.update(step=event.step)
                    of = f" of {self._last_step}" if self._last_step is not None else ""
                    self.say(f"step {event.step}{of}{_headlines(event.metrics, 'env/')}")
            case events.Evaluated():
                self.say(f"evaluated at step {event.step}{_headlines(event.metrics, 'eval/')}")
            case events.CheckpointSaved():
                self._folder.update(step=event.step)
                if not event.snapshot:
                    self.say(f"saved {event.path.name}")
            case events.RunFinished():
                self.say(f"finished after step {event.step}: {self._folder.path}")
            case _:
                pass


def _recipe(config: RunConfig) -> Recipe | None:
    """Return the recipe that a configuration names; None if it is not installed."""
    with suppress(ConfigError):
        return recipe_of(config)
    return None


def _headlines(metrics: Mapping[str, float], prefix: str) -> str:
    headlines = [f"{name} {value:.3g}" for name, value in metrics.items() if name.startswith(prefix)]
    return f": {', '.join(headlines)}" if headlines else ""


def _masked(data: Any) -> Any:
    """Return plain data with the values of secret keys and secret environment variables masked."""
    remember((*environment_secrets(), *_texts(data, secretly=False)))

    def masked(value: Any, *, secretly: bool) -> Any:
        if isinstance(value, dict):
            entries = cast("dict[str, Any]", value)
            return {key: masked(item, secretly=secretly or is_secret(key, item)) for key, item in entries.items()}
        if isinstance(value, list):
            return [masked(item, secretly=secretly) for item in cast("list[Any]", value)]
        if secretly and value not in (None, ""):
            return MASK
        return hidden(mask_urls(value)) if isinstance(value, str) else value

    return masked(data, secretly=False)


def _texts(value: Any, *, secretly: bool) -> Iterator[str]:
    """Yield the texts below secret keys of plain data, and the passwords of URLs in other texts."""
    if isinstance(value, dict):
        for key, item in cast("dict[str, Any]", value).items():
            yield from _texts(item, secretly=secretly or is_secret(key, item))
    elif isinstance(value, list):
        for item in cast("list[Any]", value):
            yield from _texts(item, secretly=secretly)
    elif isinstance(value, str):
        yield from (value,) if secretly else url_secrets(value)


def _end(folder: RunFolder, error: BaseException | None) -> None:
    if error is None:
        folder.end(RunStatus.FINISHED)
    elif isinstance(error, KeyboardInterrupt):
        folder.end(RunStatus.INTERRUPTED, "interrupted")
    else:
        reason = error.message if isinstance(error, RLinfError) else f"{type(error).__name__}: {error}"
        folder.end(RunStatus.FAILED, reason)
