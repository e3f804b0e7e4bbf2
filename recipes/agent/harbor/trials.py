"""Harbor agents, each run by Harbor's `Trial` in a box of rlinf, with the model behind the run's endpoint.

Harbor needs an interpreter of its own: Python 3.12 or newer, and a hundred packages. There `rlinf doctor` checks
whether an agent can be made with its options, JSON:

    python -m recipes.agent.harbor.trials HARNESS OPTIONS CONTEXT

The last output line is a JSON record.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from recipes.agent.boxes.box import BoxEnded, BoxError, Done, LiveBox
from recipes.agent.endpoint import token_variable
from recipes.agent.harbor.task_folder import HARBOR_HELP, TaskFolder
from rlinf_core import ConfigError
from rlinf_core.process.requirements import missing_modules

PLUGIN: Final = "recipes.agent.harbor.plugin:BoxEnvironment"
_KEY: Final = "RLINF_ENDPOINT_KEY_"
# Options that agents need to run without the internet.
_OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {"terminus-2": {"record_terminal_session": False}}
# Agents that summarize a conversation in time if they know its maximum length.
_COUNTING: Final = ("terminus-2",)
# The remaining tokens at which they do so, at most.
_ROOM: Final = 8000
_POLL_SECONDS: Final = 0.2
# The time of a trial besides the agent's, for its setup and logs.
REST_SECONDS: Final = 900.0
# The time that a cancelled trial has to copy logs out of the box.
_END_SECONDS: Final = 30.0
_TIME_UP: Final = "AgentTimeoutError"
# The exception kind reported for a trial that neither ends nor fails.
HUNG: Final = "TrialHung"
# The package of agents that run in the container and call the model from there; a box has no network.
_INSTALLED: Final = "harbor.agents.installed"
# Disables downloads and telemetry.
_QUIET: Final = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HARBOR_TELEMETRY": "off"}
# The host of the run's endpoint, whose token must not reach a proxy.
_LOCAL: Final = "127.0.0.1"
# The boxes of trials running in this process, by trial name.
trial_boxes: dict[str, TrialBox] = {}
# Cancelled trials that keep running until their boxes have ended.
_late: set[asyncio.Future[Any]] = set()


class HarnessError(Exception):
    """The failure of a Harbor agent before the model's first turn."""


@dataclass
class TrialBox:
    """The box of one trial.

    Attributes:
        box: the box, which outlives the trial.
        task: the task done in the box.
        user: the default user of commands.
        note: called with each command, its result and its seconds.
        seconds: the total time of all commands.
        failure: why the box failed; "": no failure.
    """

    box: LiveBox
    task: TaskFolder
    user: str
    note: Callable[[str, Done | str, float], None]
    seconds: float = 0.0
    failure: str = ""

    async def run(self, command: str, *, timeout: float, **how: Any) -> Done:
        """Run a shell command; see `LiveBox.run`. In a box that has ended, commands end by a signal.

        Raises:
            BoxError: the box's holder is gone.
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
    """Check that Harbor can make an agent as a trial does; see `run_trial`.

    Raises:
        ConfigError: Harbor is not installed or has no such agent, or the agent would be installed in the box or rejects
            the options.
    """
    os.environ.update(_QUIET)
    _bypass_proxies()
    if missing_modules(["harbor"]):
        raise ConfigError(
            "`agent.environment.options.harness` needs the package harbor, which is not installed", help=HARBOR_HELP
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
    """Make libraries connect to the run's endpoint directly, even if this process has a proxy."""
    # Libraries read one variable or the other.
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
    """Let a Harbor agent do a task in a box, without grading it.

    Args:
        harness: the agent's name, or `package.module:Class`.
        options: the agent's arguments.
        endpoint: the model's URL and token.
        seconds: the agent's time limit.
        spent: returns whether the model is at a limit.
        context: the maximum tokens of a conversation.

    Returns:
        The kind and message of the exception that ended the trial; "" if it succeeded or the model is at a limit.

    Raises:
        BoxError: the box failed.
    """
    configs: Any = import_module("harbor.models.trial.config")
    trials: Any = import_module("harbor.trial.trial").Trial
    url, token = endpoint
    name = f"rlinf-{uuid.uuid4().hex[:12]}"
    # In this process's environment rather than the agent's, which boxes receive.
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
    """Return the folder of a trial's logs. A late trial may still write there."""
    return tempfile.TemporaryDirectory(prefix="rlinf-trial-", ignore_cleanup_errors=True)


def _agent_config(
    configs: Any,
    harness: str,
    options: Mapping[str, Any],
    context: int,
    endpoint: tuple[str, str],
    seconds: float | None = None,
) -> Any:
    """Return a trial's agent section; `endpoint` is a URL and the name of the variable with its token."""
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
    """Return the arguments of an agent: the configured options over the defaults here."""
    size: dict[str, Any] = {}
    if harness in _COUNTING:
        # litellm does not know the model, and would assume a million tokens.
        size["model_info"] = {"max_input_tokens": context}
        size["proactive_summarization_threshold"] = min(_ROOM, context // 4)
    return {**_OPTIONS.get(harness, {}), **size, **options}


async def _until_spent(running: asyncio.Future[Any], seconds: float, spent: Callable[[], bool]) -> Any:
    """Return the result of a trial; None if it was ended because the model was at a limit or its time was up."""
    until = time.monotonic() + seconds
    try:
        while not (running.done() or spent() or time.monotonic() > until):
            await asyncio.wait({running}, timeout=_POLL_SECONDS)
    finally:
        if not running.done():
            running.cancel()
            await asyncio.wait({running}, timeout=_END_SECONDS)
    if not running.done():
        # It waits for something in the box, and ends with the box.
        _late.add(running)
        running.add_done_callback(_forget)
        return None
    return None if running.cancelled() else running.result()


def _forget(trial: asyncio.Future[Any]) -> None:
    _late.discard(trial)
    if not trial.cancelled():
        # Retrieve the exception, as no caller waits for the trial.
        trial.exception()


def time_was_up(kind: str) -> bool:
    """Return whether a trial was ended by the agent's time limit."""
    return kind == _TIME_UP


def look(harness: str, options: Mapping[str, Any], context: int) -> dict[str, str]:
    """Return whether an agent can be made, for `rlinf doctor`: `verdict`, `what` and `help`."""
    try:
        check_harness(harness, options, context)
    except ConfigError as error:
        what = f"{error.message}: {error.why}" if error.why else error.message
        return {"verdict": "fault", "what": what, "help": error.help or ""}
    return {"verdict": "ok", "what": f"Harbor's agent `{harness}` can be made with its options", "help": ""}


if __name__ == "__main__":
    print(json.dumps(look(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))))
