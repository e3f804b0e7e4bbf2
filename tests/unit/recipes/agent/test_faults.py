"""Failures of machinery around an agent are no samples; what the model does wrong itself is one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

from recipes.agent.conversation.agents import AgentOutcome, AgentTask, tool_agent
from recipes.agent.conversation.chat_model import EngineUnavailable, LanguageModel, LimitReached
from recipes.agent.environments.env_agent import EnvAgent
from recipes.agent.environments.text_environment import TextEnvironment, TextStep
from recipes.agent.tasks.tasks import Python
from recipes.agent.tools.calculator import Calculator
from recipes.agent.tools.tool import CallLost, FunctionTool, Tool, ToolError, ToolUnavailable
from recipes.agent.tools.toolbox import Toolbox
from recipes.agent.workers.agent_worker import AgentWorker
from recipes.language.answers.answer_group import Rollout
from recipes.language.answers.exits import Score
from recipes.language.data.problems import Problem
from recipes.language.prompts.prompt_messages import Prompt
from recipes.language.sandbox import sandbox
from recipes.language.sandbox.sandbox import SandboxLimits
from tests.unit.recipes.agent.local import LocalEngine, agent_config

PROMPT = Prompt(0, 0, 1, 0, 1, 1.0)
Play = Callable[[AgentTask, LanguageModel, Toolbox], Awaitable[AgentOutcome | str]]


class Local(AgentWorker):
    """An agent worker in this process."""

    _rank = 0  # type: ignore[assignment]  # pyright: ignore

    def log_warning(self, *words: Any) -> None:
        pass


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    return LocalEngine(agent_config(), warm=True)


@pytest.fixture
def course(engine: LocalEngine) -> Callable[..., Rollout]:
    """Run an agent of a worker, as often as the worker does, and return how that went."""

    def played(agent: Play, *tools: Tool, timeout: float = 60.0, **settings: Any) -> Rollout:
        worker: Any = Local.__new__(Local)
        worker._config = agent_config(agent={"tool_timeout": 0.2, "timeout": timeout, "max_turns": 2, **settings})
        worker._tools, worker._agent, worker._failures = list(tools), agent, 0
        worker._client = SimpleNamespace(leave=lambda route: None)

        async def run() -> Any:
            worker._slots = asyncio.Semaphore(1)
            route: Any = SimpleNamespace(draw=engine.draw)
            return await worker._run(PROMPT, Problem(prompt="12*3=", answer="36"), 0, route)

        (ended,) = engine.run(run())
        return ended

    return played


def caller(name: str, argument: str = "1") -> Play:
    """Return an agent that calls a tool once, and answers what it is told."""

    async def agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
        return (await tools.call(name, argument)).text

    return agent


def swallowing(name: str) -> Play:
    """Return an agent that makes an answer of whatever happens to a tool."""

    async def agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
        try:
            return (await tools.call(name, "1")).text
        except Exception:
            return "I do not know"

    return agent


async def hangs(argument: str) -> str:
    await asyncio.Event().wait()
    return argument


def refused(argument: str) -> str:
    raise ConnectionRefusedError("nobody listens")


def no_name(argument: str) -> str:
    raise socket.gaierror(socket.EAI_AGAIN, "no name server")


def wrong(argument: str) -> str:
    raise ToolError("no such town")


def raises(argument: str) -> str:
    raise ValueError(f"bad {argument}")


class Once(Tool):
    """A server that is down when it is asked first."""

    name, description = "once", "answers"

    def __init__(self) -> None:
        self.calls = 0

    async def call(self, argument: str) -> str:
        self.calls += 1
        if self.calls == 1:
            raise ToolUnavailable("the server is down")
        return argument


class TestTools:
    @pytest.mark.parametrize("function", [refused, no_name])
    def test_one_that_cannot_be_asked_costs_the_run(self, course: Any, function: Any) -> None:
        ended = course(caller(function.__name__), FunctionTool(function))
        assert (ended.failure, ended.figures["agent/retries"]) == ("tool", 1.0)

    @pytest.mark.parametrize(("function", "text"), [(wrong, "no such town"), (raises, "ValueError: bad 1")])
    def test_an_error_of_an_argument_is_a_sample(self, course: Any, function: Any, text: str) -> None:
        ended = course(caller(function.__name__), FunctionTool(function))
        assert (ended.failure, ended.figures["agent/retries"], ended.figures["agent/tool_errors"]) == ("", 0.0, 1.0)

    def test_one_that_comes_back_makes_a_sample(self, course: Any) -> None:
        tool = Once()
        ended = course(caller("once"), tool)
        assert (ended.failure, ended.figures["agent/retries"], tool.calls) == ("", 1.0, 2)

    def test_what_the_agent_makes_of_it_is_no_answer(self, course: Any) -> None:
        assert course(swallowing("refused"), FunctionTool(refused)).failure == "tool"

    def test_the_end_of_turns_after_it_is_no_sample(self, course: Any) -> None:
        async def agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
            await swallowing("refused")(task, llm, tools)
            while True:
                await llm.conversation(task.prompt).reply()

        assert course(agent, FunctionTool(refused)).failure == "tool"

    def test_the_end_of_turns_alone_is_a_sample(self, course: Any) -> None:
        async def agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
            while True:
                await llm.conversation(task.prompt).reply()

        ended = course(agent)
        assert (ended.failure, ended.exit) == ("", "turns")

    def test_what_an_agent_makes_of_the_end_of_turns_counts(self, course: Any) -> None:
        async def agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> AgentOutcome:
            with suppress(LimitReached):
                while True:
                    await llm.conversation(task.prompt).reply()
            return AgentOutcome(reward=0.5)

        ended = course(agent)
        assert (ended.failure, ended.exit, ended.score.reward) == ("", "turns", 0.5)

    def test_what_a_framework_raises_at_the_end_of_turns_is_a_sample(self, course: Any) -> None:
        async def agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
            try:
                while True:
                    await llm.conversation(task.prompt).reply()
            except LimitReached as limit:
                raise RuntimeError("status 429") from limit

        ended = course(agent)
        assert (ended.failure, ended.score) == ("", None)
        assert (ended.exit, ended.figures["agent/retries"]) == ("turns", 0.0)

    def test_a_computation_that_takes_too_long_is_a_sample(self, course: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Calculator, "call", lambda self, argument: hangs(argument))
        ended = course(caller("calculator"), Calculator())
        assert (ended.failure, ended.figures["agent/tool_timeouts"]) == ("", 1.0)


class TestSandbox:
    @pytest.fixture
    def python(self, monkeypatch: pytest.MonkeyPatch) -> Python:
        monkeypatch.setattr(sandbox, "check", lambda: None)
        return Python(SandboxLimits())

    def test_one_that_does_not_stand_costs_the_run(
        self, course: Any, python: Python, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broken = ["sh", "-c", "echo bwrap: no permission to make a name space >&2; exit 1"]
        monkeypatch.setattr(sandbox, "command", lambda limits, filter_fd, group: broken)
        assert course(caller("python", "print(1)"), python).failure == "tool"
        with pytest.raises(ToolUnavailable, match="no permission to make a name space"):
            asyncio.run(python.call("print(1)"))

    def test_no_room_for_a_process_costs_the_run(self, python: Python, monkeypatch: pytest.MonkeyPatch) -> None:
        async def full(*words: Any, **how: Any) -> Any:
            raise BlockingIOError(11, "Resource temporarily unavailable")

        monkeypatch.setattr(asyncio, "create_subprocess_exec", full)
        with pytest.raises(ToolUnavailable, match="Resource temporarily unavailable"):
            asyncio.run(python.call("print(1)"))

    def test_a_program_that_fails_is_a_sample(self, python: Python, monkeypatch: pytest.MonkeyPatch) -> None:
        program = ["sh", "-c", "echo; echo NameError: x >&2; exit 1"]
        monkeypatch.setattr(sandbox, "command", lambda limits, filter_fd, group: program)
        with pytest.raises(ToolError, match="NameError: x"):
            asyncio.run(python.call("x"))


class TestEngines:
    def test_a_turn_that_is_not_drawn_costs_the_run(
        self, engine: LocalEngine, course: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step = engine._engine.step
        lost = {"finish_reason": "aborted", "tokens": (), "logprobs": (), "versions": (), "failure": "status 503"}
        monkeypatch.setattr(engine._engine, "step", lambda: [replace(item, **lost) for item in step()])
        seen: list[str] = []

        async def agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
            try:
                return (await llm.conversation(task.prompt).reply()).text
            except EngineUnavailable as error:
                seen.append(str(error))
                return "36"

        assert course(agent).failure == "engine"
        assert seen == ["status 503", "status 503"]
        assert course(tool_agent).failure == "engine"


class Broken(TextEnvironment):
    """An environment whose server goes away in the first step of the first episodes."""

    made = 0

    def __init__(self, bad: int, error: Exception | None = None) -> None:
        Broken.made += 1
        self._breaks = Broken.made <= bad
        self._error = error or ToolUnavailable("the server is gone")

    async def reset(self, seed: int) -> str:
        return "12*3="

    async def step(self, text: str) -> TextStep:
        if self._breaks:
            raise self._error
        return TextStep("over", 1.0, True)


class TestEnvironments:
    @pytest.mark.parametrize(("bad", "failure"), [(0, ""), (1, ""), (2, "tool")])
    def test_an_episode_begins_anew_in_a_fresh_one(self, course: Any, bad: int, failure: str) -> None:
        Broken.made = 0
        ended = course(EnvAgent(lambda: Broken(bad)))
        assert (ended.failure, Broken.made) == (failure, 1 if bad == 0 else 2)

    @pytest.mark.parametrize(("bad", "ends"), [(1, ("", "")), (2, ("", "error"))])
    def test_a_session_that_breaks_twice_is_the_policys_fault(
        self, course: Any, bad: int, ends: tuple[str, str]
    ) -> None:
        Broken.made = 0
        ended = course(EnvAgent(lambda: Broken(bad, CallLost("the session is gone"))))
        assert (ended.failure, ended.exit) == ends


async def without_an_end(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
    await llm.conversation(task.prompt).reply()
    return await hangs("")


async def unreadable(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
    return str(int((await llm.conversation(task.prompt).reply()).text + "?"))


async def leaving(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
    await llm.conversation(task.prompt).reply()
    raise SystemExit(3)


async def cancelling(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
    await llm.conversation(task.prompt).reply()
    raise asyncio.CancelledError


async def waiting_in_vain(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
    await llm.conversation(task.prompt).reply()
    raise TimeoutError


async def without_an_outcome(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> Any:
    await llm.conversation(task.prompt).reply()


async def worth_nan(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> AgentOutcome:
    await llm.conversation(task.prompt).reply()
    return AgentOutcome(reward=float("nan"))


async def crediting_nan(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
    chat = llm.conversation(task.prompt)
    await chat.reply()
    chat.credit(float("nan"))
    return "36"


class TestPrograms:
    def test_the_end_of_its_time_is_graded_by_what_was_reached(self, engine: LocalEngine, course: Any) -> None:
        async def agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
            chat = llm.conversation(task.prompt)
            await chat.reply()
            chat.credit(0.25)
            return await hangs("")

        for one in (agent, without_an_end):
            ended = course(one, timeout=0.2)
            assert (ended.failure, ended.exit, ended.score) == (
                "",
                "time_limit",
                Score(0.0, "the agent failed: not finished within 0.2 s"),
            )
            assert ended.figures["agent/retries"] == 0.0

    @pytest.mark.parametrize(
        "agent",
        [unreadable, leaving, cancelling, waiting_in_vain, without_an_outcome, worth_nan, crediting_nan],
        ids=lambda agent: agent.__name__,
    )
    def test_what_follows_twice_from_the_models_words_is_a_sample(self, course: Any, agent: Play) -> None:
        ended = course(agent)
        assert (ended.failure, ended.exit, ended.score.reward) == ("", "error", 0.0)
        assert ended.figures["agent/retries"] == 1.0

    def test_what_happens_once_is_done_again(self, course: Any) -> None:
        seen: list[str] = []

        async def agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
            seen.append((await llm.conversation(task.prompt).reply()).text)
            return seen[1]

        ended = course(agent)
        assert (ended.failure, ended.exit, ended.figures["agent/retries"]) == ("", "", 1.0)
        # The same draws: what the model says is the same.
        assert seen[0] == seen[1]

    @pytest.mark.parametrize("error", [KeyError("answer"), SystemExit(3), TimeoutError()])
    def test_what_comes_before_the_models_words_is_no_sample(self, course: Any, error: BaseException) -> None:
        async def agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
            raise error

        ended = course(agent)
        assert (ended.failure, ended.exit, ended.figures["agent/retries"]) == ("error", "", 1.0)
