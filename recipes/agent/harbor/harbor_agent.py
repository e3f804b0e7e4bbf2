"""The agent that does tasks with images: it has a shell in a box, and its work is graded in a fresh box.

Its tool `bash` runs commands there; a Harbor agent has tools of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from recipes.agent.agent_config import AgentConfig
from recipes.agent.boxes.box import BoxEnded, BoxError, Done, LiveBox
from recipes.agent.boxes.box_limits import half_of_memory
from recipes.agent.boxes.boxes import DEFAULT_FOLDER, BoxHost
from recipes.agent.boxes.image_building import image_of
from recipes.agent.boxes.image_store import Image, ImageStore
from recipes.agent.conversation.agents import AgentOutcome, AgentTask, tool_agent
from recipes.agent.conversation.chat_model import LanguageModel, LimitReached
from recipes.agent.conversation.turn_messages import ChatMessage
from recipes.agent.endpoint import serve
from recipes.agent.harbor.grading import CheckedTask, Grade, finish, grade, load_checked, task_box
from recipes.agent.harbor.task_folder import TaskFolder
from recipes.agent.harbor.trials import HarnessError, TrialBox, check_harness, run_trial, time_was_up
from recipes.agent.tool_config import HarborOptions
from recipes.agent.tools.tool import Observation, Tool, Toolbox, ToolCall, ToolError, ToolUnavailable
from recipes.language.config.problem_config import MOST_GENERATED
from rlinf_core import ConfigError
from rlinf_core.process.activity import show_holdings

# The extra seconds that the toolbox allows, as the box itself enforces the limit of a command.
_PATIENCE_SECONDS: Final = 120.0
_SHOWN: Final = 2000
_MOST_DROPPED: Final = 20
# The numbers of a Harbor agent's commands that a sample shows: the first ones, and the last ones of the rest.
_FIRST, _LAST = 100, 20
# The maximum logged failures of Harbor agents; all are counted.
_MOST_WARNINGS: Final = 3
LOGGER = logging.getLogger("rlinf")


class TaskAgent:
    """Does one task per run, selected by the seed; evaluation tasks are held out.

    Attributes:
        keeps_time: this agent limits a run's time itself, so that unfinished work is graded.

    Raises:
        ConfigError: see `load_checked` and `check_harness`; or there are too few tasks, or one needs more memory than
            all boxes may have.
    """

    keeps_time = True

    def __init__(self, config: AgentConfig, environment: HarborOptions) -> None:
        self._config, self._environment = config.agent, environment
        self._has_template = config.data.apply_chat_template
        self._system_prompt = (config.data.system_prompt or "") if self._has_template else ""
        if environment.harness is not None:
            check_harness(environment.harness, environment.agent_options, config.runner.seq_length)
        self._tasks = load_checked(Path(environment.path), environment.harness)
        if len(self._tasks) < 2:
            raise ConfigError(f"`{environment.path}` has only {len(self._tasks)} task; there must be two at least")
        self._held = min(config.data.val_size, len(self._tasks) // 2)
        self._folder = Path(environment.box_folder or DEFAULT_FOLDER)
        self._memory = environment.box_memory_mib or half_of_memory()
        large = max((task for task, _ in self._tasks), key=lambda task: task.memory_mib)
        if large.memory_mib > self._memory:
            raise ConfigError(
                f"the task `{large.name}` needs {large.memory_mib} MiB, and all boxes of this node may have"
                f" {self._memory} MiB",
                help="raise `agent.environment.options.box_memory_mib`, or lower `memory_mb` in the task's task.toml",
            )
        self._store: ImageStore | None = None
        self._images: dict[str, asyncio.Task[Image]] = {}
        self._context = config.runner.seq_length
        self._broken = 0

    async def __call__(self, task: AgentTask, llm: LanguageModel, tools: Toolbox) -> AgentOutcome:
        """Do a task, and return the outcome; an agent as `Agent` says.

        Raises:
            ToolUnavailable: no box could be made, or its holder was killed.
        """
        folder, checked = self._task(int(task.row.get("seed", 0)))
        try:
            if self._store is None:
                self._store = ImageStore(BoxHost(self._folder, self._memory))
                show_holdings(self._store.boxes.shown)
            store = self._store
            image = await self._image(store, folder)
            async with store.boxes.admission.admit(folder.memory_mib):
                return await self._done(store, folder, checked, image, task, llm, tools)
        except (BoxError, ConfigError) as error:
            raise ToolUnavailable(f"the box of `{folder.name}`: {error}") from error

    async def _done(
        self,
        store: ImageStore,
        folder: TaskFolder,
        checked: CheckedTask,
        image: Image,
        task: AgentTask,
        llm: LanguageModel,
        tools: Toolbox,
    ) -> AgentOutcome:
        began, figures = time.perf_counter(), tools.figures
        async with task_box(store, folder, image) as box:
            figures["agent/box_seconds/start"] += time.perf_counter() - began
            user, parts = folder.agent_user or image.user, dict[str, float]()
            if self._environment.harness is None:
                bash = Bash(box, self._config.tool_timeout, user)
                parts["time_up"] = float(await self._play(folder, bash, task, llm, tools))
            else:
                shown = _Commands(tools)
                bash = TrialBox(box, folder, user, shown.note)
                kind, why = await self._play_trial(bash, self._environment.harness, llm)
                shown.end()
                parts["time_up"] = float(time_was_up(kind))
                parts["harness_error"] = float(bool(kind) and not time_was_up(kind))
                if parts["harness_error"]:
                    self._warn(folder, f"{kind}: {why}", tools)
            ended = box.over
            left = await finish(folder, image, box, checked.mode)
            began = time.perf_counter()
            result = await grade(store, folder, image, store.boxes.kept(box), checked.expected)
        figures["agent/box_seconds/commands"] += bash.seconds
        figures["agent/box_seconds/tests"] += time.perf_counter() - began
        figures["agent/box_peak_mib"] = left.peak / (1 << 20)
        figures["agent/grades/again"] = float(result.tries > 1)
        figures["agent/grades/tampered"] = float(result.tampered)
        figures["agent/grades/timeout"] = float(result.timed_out)
        tools.note(ToolCall("tests", "bash /tests/test.sh"), _shown(result, left.dropped, left.dropped_count))
        parts["box_ended"] = float(bool(ended))
        return AgentOutcome(answer=result.why, reward=result.reward, parts=parts)

    async def _play(self, folder: TaskFolder, bash: Bash, task: AgentTask, llm: LanguageModel, tools: Toolbox) -> bool:
        """Let the model use the shell until it is done or at a limit; return whether its time was up."""
        own = tools.with_tools([bash], self._config.tool_timeout + _PATIENCE_SECONDS)
        system = "\n\n".join(filter(None, (self._system_prompt, "" if own.functions else own.instructions)))
        if system and self._has_template:
            messages = (ChatMessage("system", system), ChatMessage("user", folder.instruction))
        else:
            messages = (ChatMessage("user", "\n\n".join(filter(None, (system, folder.instruction)))),)
        clock = asyncio.timeout(min(folder.agent_seconds, self._config.timeout))
        try:
            async with clock:
                await tool_agent(task._replace(prompt=folder.instruction, messages=messages), llm, own)
        except LimitReached:
            return False
        except TimeoutError:
            if not clock.expired():
                raise
            return True
        return False

    async def _play_trial(self, shared: TrialBox, harness: str, llm: LanguageModel) -> tuple[str, str]:
        """Let a Harbor agent do the task; return what ended it, as `run_trial` does.

        Raises:
            BoxError: the box failed.
            HarnessError: the agent failed, or ran out of time, before the model's first turn.
        """
        seconds = min(shared.task.agent_seconds, self._config.timeout)
        options = self._environment.agent_options
        async with serve(llm) as endpoint:
            kind, why = await run_trial(
                shared, harness, options, endpoint, seconds, lambda: bool(llm.limit), self._context
            )
        if kind and not llm.turns:
            raise HarnessError(f"`{harness}` of Harbor: {kind}: {why}")
        return kind, why

    def _warn(self, folder: TaskFolder, why: str, tools: Toolbox) -> None:
        """Report that a Harbor agent failed, although its work is graded."""
        harness = self._environment.harness or ""
        tools.note(ToolCall("harness", harness), Observation(why[:_SHOWN], "error", 0.0))
        self._broken += 1
        if self._broken <= _MOST_WARNINGS:
            rest = "; further ones are only counted, in `harness_error`" if self._broken == _MOST_WARNINGS else ""
            LOGGER.warning("`%s` of Harbor broke at `%s`, and is graded: %s%s", harness, folder.name, why, rest)

    async def _image(self, store: ImageStore, folder: TaskFolder) -> Image:
        """Return the image of a task, made once in this process."""
        if folder.digest not in self._images:
            making = image_of(store, folder.environment, folder.docker_image, seconds=folder.build_seconds)
            self._images[folder.digest] = asyncio.create_task(making)
        try:
            return await asyncio.shield(self._images[folder.digest])
        except Exception as error:
            # The next run tries again.
            self._images.pop(folder.digest, None)
            if isinstance(error, OSError):
                raise BoxError(f"its image cannot be made: {error}") from error
            raise

    def _task(self, seed: int) -> tuple[TaskFolder, CheckedTask]:
        """Return the task of a seed; evaluation tasks are never trained on."""
        if seed >= MOST_GENERATED:
            return self._tasks[(seed - MOST_GENERATED) % self._held]
        return self._tasks[self._held + seed % (len(self._tasks) - self._held)]


class _Commands:
    """Shows a Harbor agent's commands like a model's: the first ones at once, and the last ones at the end."""

    def __init__(self, tools: Toolbox) -> None:
        self._tools = tools
        self._count = 0
        self._last: deque[tuple[ToolCall, Observation]] = deque(maxlen=_LAST)

    def note(self, command: str, done: Done | str, seconds: float) -> None:
        """Record a command; see `TrialBox.note`."""
        text = done if isinstance(done, str) else (done.output + done.errors).decode(errors="replace").rstrip("\n")
        failure = "timeout" if isinstance(done, Done) and done.timed_out else ""
        shown = ToolCall("bash", command[:_SHOWN]), Observation(text[-_SHOWN:], failure, seconds)
        self._count += 1
        if self._count <= _FIRST:
            self._tools.note(*shown)
        else:
            self._last.append(shown)

    def end(self) -> None:
        """Show the last commands, and how many were left out."""
        left_out = self._count - _FIRST - len(self._last)
        if left_out > 0:
            text = f"{left_out} commands are not shown; these are the last"
            self._tools.note(ToolCall("bash", "..."), Observation(text, "", 0.0))
        for shown in self._last:
            self._tools.note(*shown)


def _shown(result: Grade, dropped: Sequence[str], count: int) -> Observation:
    """Return the grade in the form in which a sample shows it."""
    lines = [result.output[-_SHOWN:].strip(), f"reward {result.reward:g}" + (f": {result.why}" if result.why else "")]
    if count:
        rest = f", and {count - _MOST_DROPPED} more" if count > _MOST_DROPPED else ""
        lines.append(f"not kept for the tests: {', '.join(dropped[:_MOST_DROPPED])}{rest}")
    return Observation("\n".join(filter(None, lines)), "timeout" if result.timed_out else "", result.seconds)


_PRINTED: Final = 3500


class Bash(Tool):
    """Runs a command; the result is its output, and its exit status if not 0.

    Args:
        box: the box of the run.
        timeout: the time limit of one command in seconds.
        user: the user in the box; "": root.

    Attributes:
        seconds: the total time of all commands.
    """

    name = "bash"
    description = "runs a command of the shell and gives what it prints"
    parameters: Mapping[str, Any] = MappingProxyType(
        {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    )
    computes = True

    def __init__(self, box: LiveBox, timeout: float, user: str = "") -> None:
        self._box, self._timeout, self._user = box, timeout, user
        self.seconds = 0.0

    def argument(self, values: Mapping[str, Any]) -> str:
        command = values.get("command")
        if set(values) != {"command"} or not isinstance(command, str):
            raise ToolError('the arguments of bash are {"command": TEXT}')
        return command

    async def call(self, argument: str) -> str:
        began = time.perf_counter()
        try:
            done = await self._box.run(["bash", "-c", argument], user=self._user, timeout=self._timeout)
        except BoxEnded as error:
            raise ToolError(str(error)) from None
        except BoxError as error:
            raise ToolUnavailable(f"the box of the task: {error}") from None
        finally:
            self.seconds += time.perf_counter() - began
        text = _middle_out((done.output + done.errors).decode(errors="replace").rstrip("\n"))
        if done.timed_out:
            raise ToolError(f"the command was ended after {self._timeout:g} s; it had printed: {text}")
        if done.status == 0:
            return text
        ended = f"signal {-done.status}" if done.status < 0 else f"exit status {done.status}"
        return f"{text}\n[{ended}]".lstrip("\n")


def _middle_out(text: str) -> str:
    """Return a text, without its middle if it is long: errors are often at the end."""
    if len(text) <= _PRINTED:
        return text
    half = _PRINTED // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
