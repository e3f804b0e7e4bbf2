"""Failures of machinery around an agent are no samples; what the model does wrong itself is one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from recipes.agent.agent_runner import AgentRunner, SlowTools
from recipes.agent.conversation.agents import AgentOutcome, AgentTask, EnvAgent, TextEnvironment, TextStep, tool_agent
from recipes.agent.conversation.chat_model import EngineUnavailable, LanguageModel, LimitReached
from recipes.agent.tasks_and_tools import Python
from recipes.agent.tools.computing_tools import Calculator
from recipes.agent.tools.tool import CallLost, FunctionTool, Tool, Toolbox, ToolError, ToolUnavailable
from recipes.agent.workers.agent_worker import AgentWorker
from recipes.language.answers.answer_group import Rollout
from recipes.language.answers.prompt_messages import Prompt
from recipes.language.answers.sequences import Score
from recipes.language.data.problems import Problem
from recipes.language.loop.reasoning_runner import ReasoningRunner
from recipes.language.sandbox import sandbox
from recipes.language.sandbox.sandbox import SandboxLimits
from rlinf_core.errors import RunError
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

    def played(agent: Play, *tools: Tool, timeout: float = 60.0, prompt: Prompt = PROMPT, **settings: Any) -> Rollout:
        left: list[Any] = []
        worker: Any = Local.__new__(Local)
        worker._config = agent_config(agent={"tool_timeout": 0.2, "timeout": timeout, "max_turns": 2, **settings})
        worker._tools, worker._agent, worker._failures = list(tools), agent, 0
        worker._client = SimpleNamespace(leave=left.append)
        problem = Problem(prompt="12*3=", answer="36")
        worker._tasks = {prompt.trains: [problem]}

        async def run() -> Any:
            worker._slots = asyncio.Semaphore(1)
            return await worker._run(prompt, problem, 1, route)

        route: Any = SimpleNamespace(draw=engine.draw)
        (ended,) = engine.run(run())
        assert left == [route]
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


async def talking(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> Any:
    """Speak until there are no turns left."""
    while True:
        await llm.conversation(task.prompt).reply()


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
            return await talking(task, llm, tools)

        assert course(agent, FunctionTool(refused)).failure == "tool"

    def test_the_end_of_turns_alone_is_a_sample(self, course: Any) -> None:
        ended = course(talking)
        assert (ended.failure, ended.exit) == ("", "turns")

    def test_what_an_agent_makes_of_the_end_of_turns_counts(self, course: Any) -> None:
        async def agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> AgentOutcome:
            with suppress(LimitReached):
                await talking(task, llm, tools)
            return AgentOutcome(reward=0.5)

        ended = course(agent)
        assert (ended.failure, ended.exit, ended.score.reward) == ("", "turns", 0.5)

    def test_what_a_framework_raises_at_the_end_of_turns_is_a_sample(self, course: Any) -> None:
        async def agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
            try:
                return await talking(task, llm, tools)
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

    @pytest.mark.parametrize("settings", [{}, {"stop": [""]}, {"max_new_tokens": -1}])
    def test_a_turn_that_none_can_draw_costs_its_run_alone(self, course: Any, settings: dict[str, Any]) -> None:
        async def agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
            return (await llm.conversation("x" if settings else "").reply(**settings)).text

        assert course(agent).failure == "error"
        assert course(tool_agent).failure == ""


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


def ends_with(result: Any) -> Play:
    """Return an agent that returns or raises something after the model has spoken."""

    async def agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> Any:
        await llm.conversation(task.prompt).reply()
        if isinstance(result, BaseException):
            raise result
        return result

    return agent


async def crediting_nan(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
    chat = llm.conversation(task.prompt)
    await chat.reply()
    chat.credit(float("nan"))
    return "36"


async def crediting_none(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
    await llm.conversation(task.prompt).reply()
    llm.conversation(task.prompt).credit(1.0)
    return "36"


class MuteError(Exception):
    """Has a message that cannot be shown."""

    def __str__(self) -> str:
        raise ValueError("no message")


class Stopped(BaseException):
    """What some test libraries raise."""


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
        [
            pytest.param(ends_with(ValueError("invalid literal for int()")), id="unreadable"),
            pytest.param(ends_with(SystemExit(3)), id="leaving"),
            pytest.param(ends_with(asyncio.CancelledError()), id="cancelling"),
            pytest.param(ends_with(TimeoutError()), id="waiting in vain"),
            pytest.param(ends_with(None), id="without an outcome"),
            pytest.param(ends_with(AgentOutcome(reward=float("nan"))), id="worth NaN"),
            pytest.param(ends_with(AgentOutcome(reward=float("nan"), parts={"reward": 1.0})), id="hiding NaN"),
            pytest.param(ends_with(AgentOutcome(reward=cast("Any", "1"))), id="worth a text"),
            pytest.param(ends_with(AgentOutcome(reward=cast("Any", np.str_("1")))), id="worth a text of numpy"),
            pytest.param(ends_with(AgentOutcome(reward=1e300)), id="infinite in float32"),
            pytest.param(ends_with(AgentOutcome(answer=cast("Any", 36))), id="answering a number"),
            pytest.param(ends_with(Stopped()), id="stopping"),
            pytest.param(ends_with(MuteError()), id="without words"),
            pytest.param(crediting_nan, id="crediting NaN"),
            pytest.param(crediting_none, id="crediting no turn"),
        ],
    )
    def test_what_follows_twice_from_the_models_words_is_a_sample(self, course: Any, agent: Play) -> None:
        ended = course(agent)
        assert (ended.failure, ended.exit, ended.score.reward) == ("", "error", 0.0)
        assert ended.figures["agent/retries"] == 1.0

    def test_a_reward_of_numpy_is_a_number_like_others(self, course: Any) -> None:
        ended = course(ends_with(AgentOutcome(reward=cast("Any", np.float32(0.5)), parts={"speed": True})))
        assert (repr(ended.score.reward), repr(dict(ended.score.parts))) == ("0.5", "{'speed': 1.0}")

    def test_an_agent_that_tries_forever_ends_at_its_time(self, course: Any) -> None:
        async def agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
            chat = llm.conversation(task.prompt)
            while True:
                with suppress(Exception):
                    await chat.reply()

        assert course(agent, timeout=0.2).exit == "time_limit"

    def test_an_agent_that_ignores_its_end_holds_nothing_up(self, course: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("recipes.agent.workers.agent_worker._END_SECONDS", 0.1)

        async def agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
            await llm.conversation(task.prompt).reply()
            with suppress(asyncio.CancelledError):
                await hangs("")
            return await hangs("")

        ended = course(agent, timeout=0.2)
        assert (ended.exit, ended.score.reason) == (
            "time_limit",
            "the agent failed: not finished within 0.2 s, and it goes on although it was cancelled",
        )

    def test_a_run_that_is_given_up_waits_for_its_agent_to_clean_up(self, course: Any) -> None:
        steps: list[str] = []

        async def agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
            (run,) = (other for other in asyncio.all_tasks() if getattr(other.get_coro(), "__name__", "") == "run")
            run.cancel()
            try:
                return await hangs("")
            finally:
                await asyncio.sleep(0.05)
                steps.append("cleaned up")

        with pytest.raises(asyncio.CancelledError):
            course(agent)
        assert steps == ["cleaned up"]

    def test_what_an_agent_returns_at_its_end_counts(self, course: Any) -> None:
        async def agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> AgentOutcome:
            await llm.conversation(task.prompt).reply()
            with suppress(asyncio.CancelledError):
                await hangs("")
            return AgentOutcome(reward=0.25)

        ended = course(agent, timeout=0.2)
        assert (ended.exit, ended.score.reward) == ("", 0.25)

    def test_an_agent_changes_the_row_of_its_own_run_alone(self, course: Any) -> None:
        seen: list[Any] = []

        async def agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
            row = cast("dict[str, Any]", task.row)
            seen.append(row.setdefault("calls", []).copy())
            row["calls"].append("mine")
            return await ends_with(ValueError("bad"))(task, llm, tools)  # type: ignore[return-value]

        course(agent)
        assert seen == [[], []]

    def test_an_agent_that_is_not_async_is_told_so(self, course: Any) -> None:
        warnings: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Local, "log_warning", lambda worker, text, *words: warnings.append(words))
            assert course(lambda task, llm, tools: "36").failure == "error"
        assert "write it with `async def`" in warnings[0][1]

    def test_what_happens_once_is_done_again(self, course: Any) -> None:
        seen: list[str] = []

        async def agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
            seen.append((await llm.conversation(task.prompt).reply()).text)
            return seen[1]

        ended = course(agent)
        assert (ended.failure, ended.exit, ended.figures["agent/retries"]) == ("", "", 1.0)
        # The same draws: what the model says is the same.
        assert seen[0] == seen[1]

    def test_a_task_that_is_set_aside_is_no_sample_and_not_run(self, course: Any) -> None:
        ended = course(talking, prompt=PROMPT._replace(set_aside=True))
        assert (ended.text, ended.failure, ended.figures["agent/retries"]) == ("", "killed", 0.0)
        assert [segment.sample for segment in ended.segments] == [1]

    @pytest.mark.parametrize("error", [KeyError("answer"), SystemExit(3), TimeoutError()])
    def test_what_comes_before_the_models_words_is_no_sample(self, course: Any, error: BaseException) -> None:
        async def agent(task: AgentTask, llm: LanguageModel, tools: Toolbox) -> str:
            raise error

        ended = course(agent)
        assert (ended.failure, ended.exit, ended.figures["agent/retries"]) == ("error", "", 1.0)


def generate(monkeypatch: pytest.MonkeyPatch, share: float, run: str = "own:run") -> dict[str, float]:
    """Have a step generated in whose runs the agent raised at that share."""
    monkeypatch.setattr(ReasoningRunner, "generate_rollouts", lambda runner, step: {"exit/error": share})
    runner: Any = AgentRunner.__new__(AgentRunner)
    runner._cfg = SimpleNamespace(agent=SimpleNamespace(run=run))
    runner._calls = SimpleNamespace(lost=0, set_aside=0, take_moved=lambda: 0)
    runner._slow_tools = SimpleNamespace(look=lambda metrics: None)
    return runner.generate_rollouts(3)


@pytest.mark.parametrize(("run", "key"), [("own:run", "agent.run"), ("env_agent", "agent.environment")])
def test_an_agent_that_raises_in_every_run_ends_the_run(monkeypatch: pytest.MonkeyPatch, run: str, key: str) -> None:
    with pytest.raises(RunError, match="the agent raised in every run of step 3") as caught:
        generate(monkeypatch, 1.0, run)
    assert f"mend `{key}`" in str(caught.value.help)
    assert generate(monkeypatch, 0.75)["exit/error"] == 0.75


def test_a_tool_that_takes_most_of_a_run_is_told_once() -> None:
    output: list[str] = []
    slow = SlowTools(output.append)
    slow.look({"agent/seconds": 4.0, "agent/tool_seconds/search": 1.9, "agent/tool_seconds/calculator": 0.0})
    assert output == []
    for _ in range(2):
        slow.look({"agent/seconds": 4.0, "agent/tool_seconds/search": 3.0, "agent/tool_seconds/calculator": 0.0})
    assert output == ["agents spend 3 s of the 4 s of a run in the tool `search`"]


def test_what_takes_little_is_not_slow() -> None:
    output: list[str] = []
    SlowTools(output.append).look({"agent/seconds": 0.05, "agent/tool_seconds/search": 0.04})
    SlowTools(output.append).look({"agent/tool_seconds/search": 4.0})
    assert output == []
