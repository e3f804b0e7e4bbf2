"""Agent processes: conversations per second against one asyncio process, faults among many tasks, and their memory.

    python -m benchmarks.language.bench_agents [--only speed|faults|memory] [--tasks 1000] [--agents 4] [--processes 8]

The engine is simulated: a turn takes as long as its tokens at a fixed delay each, whatever else is drawn. Both sides
run the same agent with the same delay, in turns. Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import os
import signal
import statistics
import sys
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import ray

from benchmarks.table import Result, run_parts
from recipes.agent.agent_config import AgentConfig
from recipes.agent.conversation.agents import AgentTask, tool_agent
from recipes.agent.conversation.chat_model import DrawSettings, LanguageModel
from recipes.agent.conversation.turn_messages import ChatMessage, DrawnTurn, DrawRequest, agent_key, engine_key
from recipes.agent.task_calls import TaskCalls
from recipes.agent.tools.computing_tools import Calculator
from recipes.agent.tools.tool import Toolbox
from recipes.agent.workers.agent_worker import AgentWorker
from recipes.language.answers.answer_group import AnswerGroup
from recipes.language.answers.prompt_messages import Inbox, Prompt
from recipes.language.loop.worker_groups import LanguageLayout
from rlinf_core import Channel, ChannelEmpty, Cluster, NodePlacementStrategy, Worker, WorkerGroup
from rlinf_core.job.load import load_job

MB = 1 << 20
# Of a turn, and of each of its tokens.
TOKENS, DELAY = 20, 0.01
# Conversations at once in all, as an engine would have them in a batch.
AT_ONCE, SPEED_TASKS, ROUNDS = 128, 1024, 3
TOOL_TIMEOUT = 1.0
SLOWER, LARGEST = 2.0, 60
# Of the part about processes: bare actors beside them, tasks of each, and MiB to leave free.
BARE, TASKS_EACH, LEFT = 16, 25, 3 * 1024
# Seconds in which a node and each process on it may start.
START, START_EACH = 7.0, 0.133
# The first processes of a large group, and the seconds in which they are there.
FIRST, FIRST_SECONDS = 100, 20.0


def turn_of(request: DrawRequest) -> DrawnTurn:
    """Return a turn: a call of a tool in the beginning, and an answer after that."""
    asked = request.messages[-1].text
    text = f"<calculator>{asked.strip('=')}</calculator>" if not request.context else "408"
    tokens = tuple(range(TOKENS))
    return DrawnTurn(request.request_id, (1,) * len(asked), tokens, (-1.0,) * TOKENS, (0,) * TOKENS, text, "stop")


class SimulatedEngine(Worker):
    """Draws turns by waiting."""

    def connect(self, channel: str) -> None:
        self._channel = self.connect_channel(channel)

    def serve(self) -> int:
        """Draw turns until None comes in the place of requests; return how many."""
        inbox, due, count, ended = Inbox(self._channel, engine_key(0)), list[tuple[float, int, DrawRequest]](), 0, False
        while not ended or due:
            for requests in inbox.poll():
                ended = ended or requests is None
                for request in requests or ():
                    count += 1
                    heapq.heappush(due, (time.perf_counter() + TOKENS * DELAY, count, request))
            ready: dict[int, list[DrawnTurn]] = {}
            while due and due[0][0] <= time.perf_counter():
                request = heapq.heappop(due)[2]
                ready.setdefault(request.agent, []).append(turn_of(request))
            for agent, turns in ready.items():
                self._channel.put(tuple(turns), key=agent_key(agent))
            time.sleep(DELAY / 10)
        return count


class LocalEngine:
    """Draws the same turns in this process."""

    async def draw(self, request: DrawRequest) -> DrawnTurn:
        await asyncio.sleep(TOKENS * DELAY)
        return turn_of(request)


async def calculator(argument: str) -> str:
    """Calculate, or hang in one of a hundred calls."""
    if zlib.crc32(argument.encode()) % 100 == 0:
        await asyncio.Event().wait()
    return "408"


def configuration(*overrides: str) -> AgentConfig:
    job = load_job("agent/calculator-laptop", overrides, environ={})
    job.raise_if_bad()
    return cast("AgentConfig", job.config)


class Ended(NamedTuple):
    """The end of tasks: seconds, how often each came, and how many runs a tool has failed."""

    seconds: float
    counts: dict[int, int]
    timeouts: float


class DatedAgent(AgentWorker):
    """An agent process that knows when it was up."""

    def __init__(self, config: AgentConfig) -> None:
        super().__init__(config)
        self._up = time.time()

    def up_since(self) -> float:
        return self._up


class Processes:
    """Agent processes, a simulated engine, and this process in the place of reward workers."""

    def __init__(self, cluster: Cluster, name: str, agents: int, config: AgentConfig) -> None:
        self.channel = Channel.create(f"{name}-answers")
        self.agents = DatedAgent.create_group(config).launch(
            cluster, NodePlacementStrategy([0] * agents), name=f"{name}-agents"
        )
        self.engine = SimulatedEngine.create_group().launch(cluster, NodePlacementStrategy([0]), name=f"{name}-engine")
        layout = LanguageLayout(1, 1, 1, f"{name}-answers", "")
        cast("Any", self.agents).init_worker(layout).wait()
        self.engine.connect(f"{name}-answers").wait()
        self.calls, self.count = TaskCalls(cast("Any", self.agents), agents), agents

    def run(self, tasks: int, kill: int = 0) -> Ended:
        """Have tasks done; of the processes, kill some when a third of the tasks is done."""
        counts, timeouts, left = dict[int, int](), 0.0, kill
        serving = self.engine.serve()
        began = time.perf_counter()
        self.calls.begin([Prompt(slot, slot, 1, slot % self.count, 1, 1.0) for slot in range(tasks)])
        over = False
        while not over:
            over = self.calls.done()
            for group in self._arrived():
                counts[group.prompt.slot] = counts.get(group.prompt.slot, 0) + 1
                timeouts += sum(rollout.failure == "tool" for rollout in group.rollouts)
            if left and len(counts) > tasks / 3:
                for member in self.agents._members[:left]:  # pyright: ignore[reportPrivateUsage]
                    os.kill(cast("int", member.pid), signal.SIGKILL)
                left = 0
            time.sleep(0.005)
        seconds = time.perf_counter() - began
        self.channel.put(None, key=engine_key(0))
        serving.wait()
        return Ended(seconds, counts, timeouts)

    def _arrived(self) -> Iterable[AnswerGroup]:
        while True:
            try:
                yield from self.channel.get_nowait(key="0")
            except ChannelEmpty:
                return

    def close(self) -> None:
        for group in (self.agents, self.engine):
            cast("WorkerGroup[Any]", group).shutdown()
        self.channel.close()


def alone(tasks: int) -> float:
    """Return the seconds that one asyncio process takes for the same conversations."""
    engine, slots = LocalEngine(), asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with slots:
            model = LanguageModel(engine, DrawSettings(0, 1, 1.0, 3, 2048, 64))
            asked = f"{number % 90 + 10}*{number % 80 + 10}="
            task = AgentTask(asked, (ChatMessage("user", asked),), "408", {})
            await tool_agent(task, model, Toolbox([Calculator()], 5.0))
            model.segments()

    async def run() -> None:
        await asyncio.gather(*(one(number) for number in range(tasks)))

    began = time.perf_counter()
    asyncio.run(run())
    return time.perf_counter() - began


def measure_speed(cluster: Cluster, agents: int) -> Iterable[Result]:
    config = configuration(f"agent.max_concurrent={AT_ONCE // agents}", "runner.seq_length=2048")
    processes = Processes(cluster, "speed", agents, config)
    processes.run(AT_ONCE)
    rounds = [(processes.run(SPEED_TASKS).seconds, alone(SPEED_TASKS)) for _ in range(ROUNDS)]
    processes.close()
    ratios = sorted(theirs / ours for ours, theirs in rounds)
    middle = statistics.median(ratios)
    ours, theirs = (SPEED_TASKS / statistics.median(seconds) for seconds in zip(*rounds, strict=True))
    measured = f"{ours:.0f} and {theirs:.0f} a second; {ratios[0]:.2f} to {ratios[-1]:.2f}"
    what = f"Conversations per second, {agents} processes against one"
    yield Result(what, measured, f"{middle:.2f}x", ">= 0.8x", middle >= 0.8)


def measure_faults(cluster: Cluster, agents: int, tasks: int) -> Iterable[Result]:
    overrides = f"agent.max_concurrent={AT_ONCE // agents}", "runner.seq_length=2048"
    calm = Processes(cluster, "calm", agents, configuration(*overrides))
    without = calm.run(tasks)
    calm.close()
    hanging = "agent.tools=[benchmarks.language.bench_agents:calculator]", f"agent.tool_timeout={TOOL_TIMEOUT}"
    faulty = Processes(cluster, "faulty", agents, configuration(*overrides, *hanging))
    killed = max(1, agents // 100)
    faulted = faulty.run(tasks, kill=killed)
    lost, moved = faulty.calls.lost, faulty.calls.take_moved()
    again = sum(faulted.counts.values()) - len(faulted.counts)
    faulty.close()
    ratio = faulted.seconds / without.seconds
    yield Result(
        f"Tasks ended of {tasks}, with hanging tools and {killed} of {agents} killed",
        f"{faulted.timeouts:.0f} runs left out, {lost} died, {moved} tasks moved, {again} came twice and count once",
        f"{len(faulted.counts)}",
        f"{tasks}",
        sorted(faulted.counts) == list(range(tasks)) and lost == killed and faulted.timeouts > 0,
    )
    measured = f"{faulted.seconds:.1f} s and {without.seconds:.1f} s"
    yield Result("Time against the same without faults", measured, f"{ratio:.2f}x", f"<= {SLOWER}x", ratio <= SLOWER)


class BareActor:
    """An actor of Ray's with nothing of this project in it."""

    def pid(self) -> int:
        return os.getpid()


def own_memory(pid: int) -> float:
    """Return the memory that a process shares with no other, in MiB."""
    rows = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
    private = sum(int(row[1]) for row in rows if row[0].startswith("Private_") and row[0] != "Private_Hugetlb:")
    return private * 1024 / MB


def bare_actors() -> tuple[float, float]:
    """Return the median its own memory of a bare actor of Ray's, in MiB, and the seconds that each takes to start,
    several at once."""
    plain: Any = ray
    create = plain.remote(num_cpus=0)(BareActor)
    began = time.perf_counter()
    actors = [create.remote() for _ in range(BARE)]
    pids = plain.get([actor.pid.remote() for actor in actors])
    seconds = time.perf_counter() - began
    memory = statistics.median(map(own_memory, pids))
    for actor in actors:
        plain.kill(actor)
    return memory, seconds / BARE


def available_memory() -> float:
    """Return how much memory new processes may still take on this machine, in MiB."""
    rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(rows["MemAvailable"].split()[0]) * 1024 / MB


def measure_memory(cluster: Cluster, processes: int) -> Iterable[Result]:
    (bare, bare_start), typical = bare_actors(), float(LARGEST)
    for count in sorted({min(8, processes), min(FIRST, processes), processes}):
        left = available_memory()
        if left - count * typical < LEFT:
            yield Result(f"{count} agent processes", f"{left:.0f} MiB free, {typical:.0f} MiB each", "-", "", met=False)
            return
        began, began_at = time.perf_counter(), time.time()
        group = Processes(cluster, f"memory-{count}", count, configuration())
        started = time.perf_counter() - began
        up = sorted(group.agents.up_since().wait())
        pids = [cast("int", member.pid) for member in group.agents._members]  # pyright: ignore[reportPrivateUsage]
        own = [own_memory(pid) for pid in pids]
        torch = sum("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in pids)
        killed = count // 100
        ended = group.run(count * TASKS_EACH, kill=killed)
        group.close()
        typical, most = statistics.median(own), max(own)
        middle = (
            f"median {typical:.0f} MiB, {typical - bare:.0f} above a bare actor of Ray's ({bare:.0f});"
            f" {torch} have torch"
        )
        what = f"Memory of its own of each of {count} agent processes, most"
        yield Result(what, middle, f"{most:.0f} MiB", f"<= {LARGEST} MiB", most <= LARGEST and not torch)
        middle = f"{started / count * 1000:.0f} ms each, a bare actor of Ray's takes {bare_start * 1000:.0f} ms"
        goal = FIRST_SECONDS if count == FIRST else START + count * START_EACH
        yield Result(f"Start of {count} processes", middle, f"{started:.1f} s", f"<= {goal:.0f} s", started <= goal)
        if count > FIRST:
            first = up[FIRST - 1] - began_at
            what, goal = f"The first {FIRST} of them", FIRST_SECONDS
            yield Result(what, "", f"{first:.1f} s", f"<= {goal:.0f} s", first <= goal)
        tasks = count * TASKS_EACH
        again = sum(ended.counts.values()) - len(ended.counts)
        rate = f"{tasks / ended.seconds:.0f} a second; {killed} killed, {again} tasks came twice and count once"
        whole = sorted(ended.counts) == list(range(tasks))
        yield Result(f"Tasks of {count} processes ended", rate, f"{len(ended.counts)}", f"{tasks}", whole)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("speed", "faults", "memory"))
    parser.add_argument("--tasks", type=int, default=1000, help="of the part with faults")
    parser.add_argument("--agents", type=int, default=4, help="processes of the parts with tasks")
    parser.add_argument("--processes", type=int, default=8, help="of the part about memory")
    asked = parser.parse_args()
    with Cluster(num_nodes=1) as cluster:
        parts = {
            "speed": lambda: measure_speed(cluster, asked.agents),
            "faults": lambda: measure_faults(cluster, asked.agents, asked.tasks),
            "memory": lambda: measure_memory(cluster, asked.processes),
        }
        return run_parts(parts, asked.only)


if __name__ == "__main__":
    sys.exit(main())
