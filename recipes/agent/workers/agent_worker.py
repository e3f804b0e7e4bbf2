"""The workers that run agents."""

from __future__ import annotations

import asyncio
import copy
import inspect
import time
from dataclasses import replace
from typing import Final, cast

from recipes.agent.agent_config import AgentConfig
from recipes.agent.conversation import agents
from recipes.agent.conversation.agents import (
    Agent,
    AgentOutcome,
    AgentTask,
    EnvAgent,
    environment_maker,
    stand_in_agent,
)
from recipes.agent.conversation.chat_model import DrawSettings, LanguageModel, LimitReached, no_turn
from recipes.agent.conversation.turn_messages import EngineClient, EngineRoute, next_item
from recipes.agent.tasks_and_tools import first_messages, load_tasks, make_tools, start_servers
from recipes.agent.tool_config import HarborOptions, VerifiersOptions
from recipes.agent.tools.tool import (
    TEXTS_MENDED,
    CallLost,
    Observation,
    Tool,
    Toolbox,
    ToolCall,
    ToolUnavailable,
    check_call,
)
from recipes.agent.workers.index_worker import IndexGroup, IndexSearch, IndexWorker
from recipes.language.answers.answer_group import AnswerGroup, GroupOutlet, Rollout, TurnRecord
from recipes.language.answers.prompt_messages import GenerationReport, Prompt
from recipes.language.answers.sequences import Cause, Exit, Score
from recipes.language.data.problems import Problem, training_order
from recipes.language.loop.generation import orders_key
from recipes.language.loop.worker_groups import LanguageLayout
from recipes.language.rewards.functions import finite
from recipes.language.text.text_tokens import mended
from recipes.training.comparing_worker import ComparingWorker
from rlinf_core import WorkerGroup
from rlinf_core.errors import RuntimeFailure
from rlinf_core.failures import text_of
from rlinf_core.process import pacing
from rlinf_core.registry import import_target
from rlinf_core.runners.storage.first_contact import Difference
from rlinf_core.suggest import clipped

# The maximum logged failures of agents; all are counted.
_MOST_WARNINGS = 3
# Failures after which a run is retried: of the engine, of an unavailable tool, and of the agent's code.
_RETRIED: Final = (Cause.ENGINE, Cause.TOOL, Cause.ERROR)
# Limits that end a run without being failures.
_LIMITS: Final = (Exit.TURNS, Exit.TOKENS)
# The seconds in which an agent may end once it is cancelled.
_END_SECONDS: Final = 5.0


class AgentWorker(ComparingWorker):
    """Runs agents on tasks concurrently, several times per task, and sends the results to the reward workers.

    The process does not import torch: engines generate and tokenize.
    """

    config_section = "agent"
    forked = True

    def __init__(self, config: AgentConfig) -> None:
        super().__init__()
        self._config = config
        self._failures = 0
        self._told_mended = False
        self._agent: Agent

    def init_worker(self, layout: LanguageLayout) -> None:
        """Load tasks, tools and the agent.

        Raises:
            ConfigError: something cannot be loaded.
        """
        config = self._config
        self._layout = layout
        self._tasks = {True: load_tasks(config.data, evaluation=False), False: load_tasks(config.data, evaluation=True)}
        training, evaluation = (len(self._tasks[trains]) for trains in (True, False))
        counts = Difference(note=f"{training} tasks for training, {evaluation} for evaluation")
        self._contact.keep("rows of `data`", "their keys and types", counts)
        self._channel = self.connect_channel(layout.answers)
        self._outlet = GroupOutlet(self._channel, layout.rewards, keeps=config.runner.max_restarts.max > 0)
        self._client = EngineClient(self._channel, self._rank, layout.rollouts)
        # Completed groups that were not sent yet.
        self._whole: list[AnswerGroup] = []
        if pacing.active is None:
            self._load_agent(config)
        else:
            self._tools, self._agent = list[Tool](), stand_in_agent

    def _load_agent(self, config: AgentConfig) -> None:
        """Load tools and the agent; see `init_worker`."""
        began = time.perf_counter()
        self._tools = make_tools(config, self._index_search(), start_servers(config))
        if config.agent.mcp or "python" in config.agent.tools:
            names, seconds = Difference(note=", ".join(tool.name for tool in self._tools)), time.perf_counter() - began
            self._contact.keep("tools", "the sandbox's trial program, the lists of MCP servers", names, seconds)
        name = config.agent.run
        if name == "env_agent":
            self._agent = _make_env_agent(config)
        elif ":" in name:
            self._agent = cast("Agent", import_target(name, "agent"))
            check_call(self._agent, f"agent `{name}`", "the task", "the model", "the tools")
        else:
            self._agent = cast("Agent", getattr(agents, name))

    def _index_search(self) -> Tool | None:
        """Return a search client of the index workers; None if there are none."""
        if not self._config.has_index:
            return None
        group = WorkerGroup.from_group_name(IndexWorker, self._config.index.group_name)
        view = group.execute_on(self._rank % group.world_size)
        return IndexSearch(cast("IndexGroup", view), self.log_warning)

    def problem_counts(self) -> tuple[int, int]:
        """Return the numbers of training and evaluation tasks."""
        return len(self._tasks[True]), len(self._tasks[False])

    async def generate(self, prompts: tuple[Prompt, ...]) -> GenerationReport:
        """Run the agent on this worker's tasks, and return when all runs are over."""
        began = time.perf_counter()
        mine = [prompt for prompt in prompts if prompt.worker == self._rank]
        self._outlet.begin(prompts)
        self._slots = asyncio.Semaphore(self._config.agent.max_concurrent)
        async with self._client.open(), asyncio.TaskGroup() as tasks:
            drawn = [tasks.create_task(self._answer(prompt)) for prompt in mine]
        return GenerationReport(sum(run.result() for run in drawn), time.perf_counter() - began)

    def put_again(self, slots: tuple[int, ...]) -> tuple[int, ...]:
        """Resend the current step's groups of these slots to the reward workers.

        Returns:
            The slots that this worker has answered.
        """
        return self._outlet.put_again(slots)

    async def generate_forever(self) -> None:
        """Run the agent on tasks as the runner sends them, until it sends None and all runs are over."""
        self._outlet.streams = True
        self._slots = asyncio.Semaphore(self._config.agent.max_concurrent)
        async with self._client.open(), asyncio.TaskGroup() as tasks:
            while (prompts := await next_item(self._channel, orders_key(self._rank))) is not None:
                for prompt in prompts:
                    tasks.create_task(self._answer(prompt))
        self._outlet.streams = False

    async def _answer(self, prompt: Prompt) -> int:
        """Run the agent several times on one task, and return the number of generated tokens."""
        data, tasks, index = self._config.data, self._tasks[prompt.trains], prompt.position
        if prompt.trains:
            (index,) = training_order(len(tasks), index, 1, seed=data.seed, shuffle=data.reshuffles)
        problem, route = tasks[index], self._client.route(prompt.answers)
        runs = await asyncio.gather(*(self._run(prompt, problem, sample, route) for sample in range(prompt.answers)))
        group = AnswerGroup(prompt, index, problem, tuple(runs))
        if not self._whole:
            asyncio.get_running_loop().call_soon(self._hand_on)
        self._whole.append(group)
        return sum(run.drawn for run in runs)

    def _hand_on(self) -> None:
        """Send all groups that were completed together."""
        groups, self._whole = self._whole, []
        self._outlet.put(groups)

    async def _run(self, prompt: Prompt, problem: Problem, sample: int, route: EngineRoute) -> Rollout:
        """Run the agent once, and again from the beginning after a failure that may not be the policy's fault.

        If such a failure recurs, the run is counted and is no sample.
        """
        run = await self._attempt(prompt, problem, sample, route)
        retries = 0.0
        if run.failure in _RETRIED or run.exit == Exit.ERROR:
            run, retries = await self._attempt(prompt, problem, sample, route), 1.0
        self._client.leave(route)
        return run._replace(figures={**run.figures, "agent/retries": retries})

    async def _attempt(self, prompt: Prompt, problem: Problem, sample: int, route: EngineRoute) -> Rollout:
        if prompt.set_aside:
            why = "its processes died repeatedly"
            score = Score(self._config.reward.incorrect_reward, f"quarantined: {why}", failure=Cause.KILLED)
            return Rollout((no_turn(sample),), score=score)
        turns: list[TurnRecord] = []

        def use(call: ToolCall, seen: Observation) -> None:
            turns.append(TurnRecord("tool", seen.text, call.name, seen.seconds, seen.failure))

        model = LanguageModel(route, self._settings(prompt, sample), turns.append)
        config = self._config
        tools = Toolbox(self._tools, config.agent.tool_timeout, use, native=config.offers_functions)
        # With functions, the engine describes them in the chat template's format.
        instructions = "" if tools.functions else tools.instructions
        messages = first_messages(problem, config.data, instructions)
        # Agents may change the row, which other runs and the reward read, too.
        task = AgentTask(problem.prompt, messages, problem.answer, copy.deepcopy(problem.row))
        async with self._slots:
            began = time.perf_counter()
            outcome, ended, why = await self._outcome(task, model, tools)
            seconds = time.perf_counter() - began
        figures = {
            "agent/turns": float(model.turns),
            "agent/seconds": seconds,
            **dict.fromkeys(("agent/tool_calls", "agent/tool_errors", "agent/tool_timeouts"), 0.0),
            **tools.figures,
        }
        answer = mended(outcome.answer)
        figures[TEXTS_MENDED] = float(tools.figures[TEXTS_MENDED] + model.mended + (answer != outcome.answer))
        if figures[TEXTS_MENDED] and not self._told_mended:
            self._told_mended = True
            self.log_warning(
                "half of a character in a result of a tool, a message or an answer is read as U+FFFD; further ones are"
                " only counted, in `%s`",
                TEXTS_MENDED,
            )
        score, reward = None, config.reward
        if ended and ended not in _LIMITS:
            # Rewards credited to turns stay, as they belong to states that were reached.
            failure = ended if isinstance(ended, Cause) else ""
            score = Score(reward.incorrect_reward, f"the agent failed: {why}", outcome.parts, failure)
        elif outcome.reward is not None:
            correct = outcome.reward >= reward.correct_reward
            score = Score(outcome.reward, "given by the agent", outcome.parts, correct=correct)
        return Rollout(
            tuple(model.segments()),
            answer,
            score=score,
            turns=tuple(turns) if prompt.shown else (),
            figures=figures,
            exit=ended if isinstance(ended, Exit) else "",
        )

    async def _outcome(
        self, task: AgentTask, model: LanguageModel, tools: Toolbox
    ) -> tuple[AgentOutcome, Exit | Cause | None, str]:
        """Return the outcome of a run, what ended it early (None: nothing), and why.

        An outcome after a failed engine or tool says nothing about the policy. An exception after a limit, such as a
        framework's at status 429, counts as that limit. An exception before the model's first turn is not the model's
        fault.

        Raises:
            RuntimeFailure: the engines are gone.
        """
        outcome, ended, why = await self._played(task, model, tools)
        if model.failure or tools.failure:
            ended, why = Cause.ENGINE if model.failure else Cause.TOOL, model.failure or tools.failure
            outcome = AgentOutcome()
        elif ended is Exit.ERROR and model.limit:
            return AgentOutcome(), Exit(model.limit), ""
        elif ended is Exit.ERROR and not model.turns:
            ended = Cause.ERROR
        elif ended is None and model.limit:
            # The agent handled the limit.
            ended = Exit(model.limit)
        if ended and ended not in _LIMITS:
            self._warn(ended, why)
        return outcome, ended, why

    def _warn(self, cause: str, why: str) -> None:
        """Log the first failures."""
        self._failures += 1
        if self._failures <= _MOST_WARNINGS:
            rest = "; further failures are only counted" if self._failures == _MOST_WARNINGS else ""
            self.log_warning("an agent failed (%s): %s%s", cause, why, rest)

    async def _played(
        self, task: AgentTask, model: LanguageModel, tools: Toolbox
    ) -> tuple[AgentOutcome, Exit | Cause | None, str]:
        """Return the agent's own outcome of a run, with an end at the time limit; see `_outcome`."""
        seconds = None if getattr(self._agent, "keeps_time", False) else self._config.agent.timeout
        playing = asyncio.ensure_future(self._play(task, model, tools))
        try:
            in_time, _ = await asyncio.wait({playing}, timeout=seconds)
        finally:
            # An agent may clean up and return what it has, or ignore that it is cancelled.
            playing.cancel()
            await asyncio.wait({playing}, timeout=_END_SECONDS)
        if in_time:
            return playing.result()
        why = f"not finished within {seconds:g} s"
        if playing.done() and not playing.cancelled():
            outcome, ended, _ = playing.result()
            return (outcome, None, "") if ended is None else (AgentOutcome(), Exit.TIME_LIMIT, why)
        ignores = "" if playing.done() else ", and it goes on although it was cancelled"
        return AgentOutcome(), Exit.TIME_LIMIT, why + ignores

    async def _play(
        self, task: AgentTask, model: LanguageModel, tools: Toolbox
    ) -> tuple[AgentOutcome, Exit | Cause | None, str]:
        """Return the outcome of a run without a time limit; see `_outcome`."""
        try:
            playing: object = self._agent(task, model, tools)
            if not inspect.isawaitable(playing):
                raise TypeError(f"the agent returned {type(playing).__name__} at once: write it with `async def`")
            return _checked(await playing), None, ""
        except LimitReached as limit:
            return AgentOutcome(), Exit(limit.limit), ""
        except (RuntimeFailure, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            # Of the user's agent, such as SystemExit.
            running = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and running is not None and running.cancelling():
                raise
            is_away = isinstance(error, ToolUnavailable) and not isinstance(error, CallLost)
            reason = clipped(f"{type(error).__name__}: {text_of(error)}").partition("\n")[0]
            return AgentOutcome(), Cause.TOOL if is_away else Exit.ERROR, reason

    def _settings(self, prompt: Prompt, sample: int) -> DrawSettings:
        config = self._config
        return DrawSettings(
            sample=sample,
            seed=prompt.seed(config.actor.seed, len(self._tasks[prompt.trains])),
            temperature=prompt.temperature,
            max_turns=config.agent.max_turns,
            max_tokens=config.runner.seq_length,
            max_new_tokens=config.rollout.sampling_params.max_new_tokens,
            version=prompt.version,
            agent=self._rank,
            top_p=config.rollout.sampling_params.top_p,
            training_temperature=config.rollout.sampling_params.temperature,
        )


def _checked(outcome: object) -> AgentOutcome:
    """Convert an agent's return value to an outcome.

    Raises:
        TypeError: the value is neither a text nor an outcome, or a value in the outcome has another type.
        ValueError: a number in the outcome is not finite in float32.
    """
    if isinstance(outcome, str):
        return AgentOutcome(answer=outcome)
    if not isinstance(outcome, AgentOutcome):
        raise TypeError(f"the agent returned {type(outcome).__name__}, not a text or an `AgentOutcome`")
    answer = cast("object", outcome.answer)
    if not isinstance(answer, str):
        raise TypeError(f"`answer` of the agent's outcome is {type(answer).__name__}, not a text")
    reward = None if outcome.reward is None else finite("reward", outcome.reward)
    return replace(outcome, reward=reward, parts={name: finite(name, value) for name, value in outcome.parts.items()})


def _make_env_agent(config: AgentConfig) -> Agent:
    """Return the agent that plays a job's environment.

    Raises:
        ConfigError: the environment cannot be imported, or a package is missing.
    """
    settings = config.agent.environment.settings
    if isinstance(settings, VerifiersOptions):
        # Imported only where needed, as it imports much.
        from recipes.agent.verifiers_agent import VerifiersAgent

        return VerifiersAgent(settings, config.data.val_size)
    if isinstance(settings, HarborOptions):
        from recipes.agent.harbor.harbor_agent import TaskAgent

        return TaskAgent(config, settings)
    return EnvAgent(environment_maker(config.agent.environment))
