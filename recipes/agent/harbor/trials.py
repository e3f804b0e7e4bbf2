"""Agents of Harbor, each played by its `Trial` in a box of rlinf's, with the model behind the endpoint of the run.

Harbor is an interpreter's own: Python 3.12 or newer, and a hundred packages.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from recipes.agent.boxes.box import BoxEnded, BoxError, Done, LiveBox
from recipes.agent.endpoint.token_variable import token_variable
from recipes.agent.harbor.task_folder import HARBOR_HELP, TaskFolder
from rlinf_core import ConfigError
from rlinf_core.process.requirements import missing_modules

PLUGIN: Final = "recipes.agent.harbor.plugin:BoxEnvironment"
_KEY: Final = "RLINF_ENDPOINT_KEY_"
# What an agent needs to run without the internet.
_OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {"terminus-2": {"record_terminal_session": False}}
# Agents that shorten a conversation in time, where they know how long it may be.
_COUNTING: Final = ("terminus-2",)
# Free tokens at which they do so, where a conversation may have many.
_ROOM: Final = 8000
_POLL_SECONDS: Final = 0.2
# What a trial does besides the agent's own time: it sets the agent up, and reads its logs.
REST_SECONDS: Final = 900.0
# What a cancelled trial may still do: it takes logs out of the box.
_END_SECONDS: Final = 30.0
_TIME_UP: Final = "AgentTimeoutError"
# The kind of what ends a trial that neither ends nor fails.
HUNG: Final = "TrialHung"
# Agents that are installed in the container, and reach the model from there: a box has no network.
_INSTALLED: Final = "harbor.agents.installed"
# Nothing is asked of the internet, and nothing is told to it.
_QUIET: Final = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HARBOR_TELEMETRY": "off"}
# The endpoint of the run, whose token goes to no proxy.
_LOCAL: Final = "127.0.0.1"
# By name: the boxes of trials that run in this process.
trial_boxes: dict[str, TrialBox] = {}
# Trials that go on although they were cancelled, until their boxes have ended.
_late: set[asyncio.Future[Any]] = set()


class HarnessError(Exception):
    """An agent of Harbor failed before the model had spoken."""


@dataclass
class TrialBox:
    """The box of one trial.

    Attributes:
        box: it lives as long as the trial, and longer.
        task: the task that is done in it.
        user: who runs commands where nobody is named.
        note: called with each command, what came of it, and its seconds.
        seconds: the time of all commands.
        failure: why the box failed; "": it did not.
    """

    box: LiveBox
    task: TaskFolder
    user: str
    note: Callable[[str, Done | str, float], None]
    seconds: float = 0.0
    failure: str = ""

    async def run(self, command: str, *, timeout: float, **how: Any) -> Done:
        """Run a command of a shell; see `LiveBox.run`. A box that has ended is the end of its commands.

        Raises:
            BoxError: its holder is gone.
        """
        began, shown = time.perf_counter(), ""
        try:
            done = shown = await self.box.run(["bash", "-c", command], timeout=timeout, **how)
            return done
        except BoxEnded as error:
            shown = str(error)
            return Done(-9, b"", f"{shown}\n".encode(), timed_out=False, cpu=0.0)
        except BoxError as error:
            shown = self.failure = str(error)
            raise
        finally:
            seconds = time.perf_counter() - began
            self.seconds += seconds
            self.note(command, shown, seconds)


def check_harness(harness: str, options: Mapping[str, Any], context: int) -> None:
    """Import Harbor, and make an agent of it as a trial does; see `run_trial`.

    Raises:
        ConfigError: Harbor is not installed, it has no such agent, the agent would be installed in the box, or it
            takes no such options.
    """
    os.environ.update(_QUIET)
    _bypass_proxies()
    if missing_modules(["harbor"]):
        raise ConfigError(
            "`agent.environment.harness` needs the package harbor, which is not installed", help=HARBOR_HELP
        )
    configs: Any = import_module("harbor.models.trial.config")
    factory: Any = import_module("harbor.agents.factory").AgentFactory
    try:
        agent = factory.get_agent_class_from_config(configs.AgentConfig(**_named(harness)))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"Harbor has no agent `{harness}`", why=str(error), help="name one, such as `terminus-2`"
        ) from None
    if any(kind.__module__.startswith(_INSTALLED) for kind in agent.__mro__):
        raise ConfigError(
            f"Harbor's agent `{harness}` is installed in the container and calls its model from there",
            why="a box has no network",
            help="use one that runs beside it, such as `terminus-2`",
        )
    with token_variable(_KEY, "none") as key, _folder() as folder:
        made = _agent_config(configs, harness, options, context, ("http://127.0.0.1/v1", key))
        try:
            factory.create_agent_from_config(made, logs_dir=Path(folder))
        except Exception as error:  # noqa: BLE001 - of the user's agent
            raise ConfigError(
                f"Harbor's agent `{harness}` cannot be made",
                why=f"{type(error).__name__}: {error}",
                help="correct `agent.environment.options`",
            ) from None


def _bypass_proxies() -> None:
    """Have libraries ask the endpoint of a run directly, also where this process has a proxy."""
    # Of the two, libraries read one or the other.
    hosts = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    if hosts != "*" and _LOCAL not in hosts.split(","):
        hosts = f"{hosts},{_LOCAL}".removeprefix(",")
    os.environ.update(NO_PROXY=hosts, no_proxy=hosts)


def _named(harness: str) -> dict[str, str]:
    return {"import_path" if ":" in harness else "name": harness}


async def run_trial(
    shared: TrialBox,
    harness: str,
    options: Mapping[str, Any],
    endpoint: tuple[str, str],
    seconds: float,
    spent: Callable[[], bool],
    context: int,
) -> tuple[str, str]:
    """Have an agent of Harbor do a task in a box, without grading it.

    Args:
        harness: its name, or `package.module:Class`.
        options: arguments of it.
        endpoint: where the model is: a URL, and a token.
        seconds: the agent's time.
        spent: says whether the model may say no more.
        context: tokens of a conversation.

    Returns:
        The kind of the exception that ended it, and what it says; "" if it ended well, or as the model may say no more.

    Raises:
        BoxError: the box failed.
    """
    configs: Any = import_module("harbor.models.trial.config")
    trials: Any = import_module("harbor.trial.trial").Trial
    url, token = endpoint
    name = f"rlinf-{uuid.uuid4().hex[:12]}"
    # In this process's environment and not in the agent's, which boxes get.
    with token_variable(_KEY, token) as key, _folder() as folder:
        agent = _agent_config(configs, harness, options, context, (url, key), seconds)
        config = configs.TrialConfig(
            task=configs.TaskConfig(path=shared.task.path.absolute()),
            trial_name=name,
            trials_dir=Path(folder),
            agent=agent,
            environment=configs.EnvironmentConfig(import_path=PLUGIN, kwargs={"trial": name}),
            verifier=configs.VerifierConfig(disable=True),
        )
        trial_boxes[name] = shared
        try:
            running = asyncio.ensure_future((await trials.create(config)).run())
            result = await _until_spent(running, seconds + REST_SECONDS, spent)
        finally:
            del trial_boxes[name]
    if shared.failure:
        raise BoxError(shared.failure)
    if result is None:
        return ("", "") if spent() else (HUNG, f"it had not ended after {seconds + REST_SECONDS:g} s")
    ended = result.exception_info
    return ("", "") if ended is None else (ended.exception_type, ended.exception_message)


def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of a trial's logs. A trial that is late may still write there."""
    return tempfile.TemporaryDirectory(prefix="rlinf-trial-", ignore_cleanup_errors=True)


def _agent_config(
    configs: Any,
    harness: str,
    options: Mapping[str, Any],
    context: int,
    endpoint: tuple[str, str],
    seconds: float | None = None,
) -> Any:
    """Return the section of a trial about its agent; `endpoint` is a URL and the variable that has its token."""
    url, key = endpoint
    return configs.AgentConfig(
        **_named(harness),
        model_name="openai/policy",
        base_url=url,
        model_api_key_name=key,
        override_timeout_sec=seconds,
        kwargs=_arguments(harness, options, context),
    )


def _arguments(harness: str, options: Mapping[str, Any], context: int) -> dict[str, Any]:
    """Return the arguments of an agent: those of the file, over what it needs to know here."""
    size: dict[str, Any] = {}
    if harness in _COUNTING:
        # litellm does not know the model, and would take it for one of a million tokens.
        size["model_info"] = {"max_input_tokens": context}
        size["proactive_summarization_threshold"] = min(_ROOM, context // 4)
    return {**_OPTIONS.get(harness, {}), **size, **options}


async def _until_spent(running: asyncio.Future[Any], seconds: float, spent: Callable[[], bool]) -> Any:
    """Return the result of a trial; None if it was ended because the model may not continue or its time was up."""
    until = time.monotonic() + seconds
    try:
        while not (running.done() or spent() or time.monotonic() > until):
            await asyncio.wait({running}, timeout=_POLL_SECONDS)
    finally:
        if not running.done():
            running.cancel()
            await asyncio.wait({running}, timeout=_END_SECONDS)
    if not running.done():
        # What hinders it is in the box, and ends with that.
        _late.add(running)
        running.add_done_callback(_forget)
        return None
    return None if running.cancelled() else running.result()


def _forget(trial: asyncio.Future[Any]) -> None:
    _late.discard(trial)
    if not trial.cancelled():
        # Nobody waits for it any more.
        trial.exception()


def time_was_up(kind: str) -> bool:
    """Return whether the exception that ended a trial is the end of the agent's time."""
    return kind == _TIME_UP
