"""The agent for verifiers environments: verifiers provides rollouts, tools and rewards, and rlinf the model."""

from __future__ import annotations

import asyncio
import statistics
import sys
from importlib import import_module
from itertools import islice
from typing import Any, Final

from recipes.agent.conversation.agents import AgentOutcome, AgentTask
from recipes.agent.conversation.chat_model import LanguageModel
from recipes.agent.endpoint import ChatEndpoint, serve, token_variable
from recipes.agent.tool_config import VerifiersOptions
from recipes.agent.tools.tool import Toolbox
from recipes.language.config.problem_config import MOST_GENERATED
from rlinf_core import ConfigError
from rlinf_core.process.requirements import install_command, missing_modules

# The maximum tasks used from an endless taskset.
_MOST_TASKS: Final = 10_000
# The top-level module name by which verifiers finds the harness.
_HARNESS: Final = "rlinf_in_process_chat"


class VerifiersError(Exception):
    """An episode that verifiers reports as failed."""


class VerifiersAgent:
    """Plays one episode of a verifiers environment per run; the seed selects the environment's task.

    Args:
        settings: the configuration of the environment.
        held: the number of evaluation tasks; at most half of all are used.

    Raises:
        ConfigError: verifiers or the taskset is not installed, or the options are invalid.
    """

    def __init__(self, settings: VerifiersOptions, held: int) -> None:
        if missing_modules(["verifiers"]):
            raise ConfigError("`verifiers` needs the package verifiers", help=f"run `{install_command('verifiers')}`")
        try:
            self._library: Any = import_module("verifiers.v1")
            self._environment: Any = _loaded(settings)
            self._tasks: list[Any] = list(islice(self._environment.taskset, _MOST_TASKS))
        except Exception as error:
            raise ConfigError(
                f"the verifiers environment `{settings.taskset}` cannot be loaded",
                why=f"{type(error).__name__}: {error}",
                help="install the package that provides it, and check `agent.environment.options`",
            ) from error
        if len(self._tasks) < 2:
            raise ConfigError(f"the verifiers environment `{settings.taskset}` has only {len(self._tasks)} tasks")
        self._held = min(held, len(self._tasks) // 2)
        self._ready: asyncio.Future[None] | None = None
        self._serving: asyncio.Task[None] | None = None

    async def __call__(self, task: AgentTask, llm: LanguageModel, tools: Toolbox) -> AgentOutcome:
        """Play, and return the outcome; an agent as `Agent` says.

        Raises:
            VerifiersError: the episode failed.
        """
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._serving = asyncio.ensure_future(self._serve(self._ready))
        await asyncio.shield(self._ready)
        async with serve(llm) as endpoint:
            episode = await self._played(self._task(int(task.row.get("seed", 0))), endpoint)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise VerifiersError(f"{errors[-1].type}: {errors[-1].message}" if errors else "no reason given")
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        parts = {name: float(reward.value) for name, reward in traces[0].rewards.items() if reward is not None}
        return AgentOutcome(reward=statistics.fmean(trace.reward for trace in traces), parts=parts)

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        """Run the proxy through which verifiers calls the model in all episodes of this process."""
        try:
            async with self._environment.serving():
                ready.set_result(None)
                await asyncio.Future()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)

    async def _played(self, task: Any, endpoint: ChatEndpoint) -> Any:
        library = self._library
        # Programs started by verifiers do not inherit variables of such names, so they cannot read other tasks' tokens.
        with token_variable("VERIFIERS_API_KEY_", endpoint.api_key) as variable:
            client = library.EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable)
            return await self._environment.run_episode(task, library.ModelContext(model="policy", client=client))

    def _task(self, seed: int) -> Any:
        """Return the task of a seed; evaluation tasks are never trained on."""
        if seed >= MOST_GENERATED:
            return self._tasks[(seed - MOST_GENERATED) % self._held]
        return self._tasks[self._held + seed % (len(self._tasks) - self._held)]


def _loaded(settings: VerifiersOptions) -> Any:
    """Return the environment, whose agents run in subprocesses."""
    loaders: Any = import_module("verifiers.v1.utils.loaders")
    library: Any = import_module("verifiers.v1")
    if settings.harness is None:
        sys.modules[_HARNESS] = import_module("recipes.agent.verifiers_chat")
    agent = {"harness": {"id": settings.harness or _HARNESS}, "runtime": {"type": "subprocess"}}
    kind = loaders.env_config_type(settings.taskset)
    seats = [name for name, field in kind.model_fields.items() if isinstance(field.default, library.AgentConfig)]
    taskset = {"id": settings.taskset, **settings.taskset_options}
    return loaders.load_environment(
        loaders.resolve_env_config({"taskset": taskset, **{seat: dict(agent) for seat in seats}})
    )
