"""A run of a language recipe in a simulated world: the real plan of prompts, limit of restarts and snapshots.

Judged is that every step learns from its own problems, each once, from answers that are young enough, whatever dies;
that restarts are allowed as often as they may, and no more; and that snapshots cost and lose as little as promised.
"""

from __future__ import annotations

import json
import random
from typing import Any

from recipes.language.answers.prompt_messages import GroupReport, Prompt
from recipes.language.loop.prompt_plan import PromptPlan
from rlinf_core.config.sections.runner import RestartLimit
from rlinf_core.runners.recovery import Restarts, SnapshotSchedule
from tests.unit.simulation.world import Wire, World


class Worker:
    """A rollout worker: it answers prompts once it has the weights that they ask for."""

    def __init__(self, run: PlanRun, rank: int) -> None:
        self.run, self.rank, self.version = run, rank, run.version
        self.life = run.life
        self.alive = True
        self.waiting: list[Prompt] = []
        self.asked = Wire(run.world, self._receive)
        self._back = Wire(run.world, lambda report: run.arrived(self, report))

    def _receive(self, message: Prompt | int) -> None:
        if isinstance(message, int):
            self.run.world.soon(self._load, message, within=1.5)
        else:
            self.waiting.append(message)
            self._begin()

    def _load(self, version: int) -> None:
        self.version = max(self.version, version)
        self._begin()

    def _begin(self) -> None:
        if not self.alive:
            return
        ready = [prompt for prompt in self.waiting if prompt.version <= self.version]
        self.waiting = [prompt for prompt in self.waiting if prompt.version > self.version]
        for prompt in ready:
            self.run.world.soon(self._answer, prompt, self.version, within=2.0)

    def _answer(self, prompt: Prompt, oldest: int) -> None:
        if self.alive:
            fate = self.run.fate(prompt.position)
            self._back.send(
                GroupReport(
                    slot=prompt.slot,
                    step=prompt.step,
                    problem=prompt.position,
                    source="",
                    difficulty="",
                    tokens=2,
                    rewards=(0.0, 1.0),
                    lengths=(1,),
                    truncated=0,
                    failures={},
                    parts={},
                    oldest=oldest,
                    version_sum=self.version,
                    dropped=fate == "dropped",
                    spoiled=fate == "spoiled",
                )
            )


class PlanRun:
    """A run from its first step to its last, or to the end of its restarts."""

    def __init__(self, world: World) -> None:
        draw = world.random
        self.world = world
        self.staleness = draw.choice((0, 0, 1, 2))
        self.batch, self.workers_count = draw.randint(1, 4), draw.randint(1, 3)
        self.refills = draw.choice((0, 0, 1))
        self.last = draw.randint(4, 10)
        self.step = self.version = self.life = 0
        self.over = self.may_restart = True
        within = draw.choice((None, "5s", "60s"))
        self.limit = RestartLimit(max=draw.randint(0, 4), within=within)
        self.restarts = Restarts(self.limit, world.clock)
        self.schedule = SnapshotSchedule(draw.choice((0.5, 3.0)), world.clock)
        self.learned: dict[int, list[int]] = {}
        # The problems whose answers came for a step, also where nothing is learned from them.
        self.answered: dict[int, list[int]] = {}
        self.deaths: list[float] = []
        self.spent = self.ended = 0.0
        self._seed = draw.random()
        self._saved: tuple[int, str] = (0, "")

    def fate(self, position: int) -> str:
        """Return what becomes of the answers to a problem, which no time decides."""
        if not self.refills:
            return "kept"
        return random.Random(f"{self._seed} {position}").choice(("kept", "kept", "kept", "dropped", "spoiled"))

    def _plan(self) -> PromptPlan:
        return PromptPlan(
            batch_size=self.batch,
            max_staleness=self.staleness,
            max_refills=self.refills,
            workers=self.workers_count,
            answers=2,
            temperature=1.0,
        )

    def play(self) -> None:
        self._begin()
        for _ in range(self.world.random.randint(0, 4)):
            self.world.after(self.world.random.random() * 20, self._die)
        self.world.run(300.0)
        self._judge()

    def _begin(self) -> None:
        self.over = False
        self.step, state = self._saved
        self.version = self.step
        self.plan = self._plan()
        if state:
            self.plan.restore(json.loads(state), self.step, self.version)
        self.workers = [Worker(self, rank) for rank in range(self.workers_count)]
        self.world.note("begins after step", self.step)
        self._ask()

    def _ask(self) -> None:
        steps = range(self.step + 1, self.step + 2 + self.staleness)
        for prompt in self.plan.due(steps, self.version):
            self.world.note("asks", prompt.position, "for step", prompt.step, "of", prompt.worker)
            self.workers[prompt.worker].asked.send(prompt)

    def arrived(self, worker: Worker, report: GroupReport) -> None:
        if self.over or worker.life != self.life:
            return
        self.plan.arrived(report)
        while self.plan.is_whole(self.step + 1):
            self._learn()
            if self.step == self.last:
                self.over, self.ended = True, self.world.now
                return
        self._ask()

    def _learn(self) -> None:
        check, step = self.world.check, self.step + 1
        taken = self.plan.take(step)
        kept = [report for report in taken if report.kept]
        self.answered[step] = [report.problem for report in taken]
        for report in kept:
            age = self.version - report.oldest
            check(age <= self.staleness, "step", step, "learns from answers that are", age, "versions old")
        self.learned[step] = [report.problem for report in kept]
        self.world.note("learns", step, *self.learned[step])
        self.step = self.version = step
        for worker in self.workers:
            worker.asked.send(self.version)
        if self.schedule.due:
            with self.schedule.saving():
                cost = self.world.random.random() * 0.2
                self.world.now += cost
                self._saved = step, json.dumps(self.plan.state())
            self.spent += cost

    def _die(self) -> None:
        """Lose all processes, as when the actor dies."""
        if self.over:
            return
        world, now = self.world, self.world.now
        self.life += 1
        for worker in self.workers:
            worker.alive = False
        seconds = self.limit.seconds
        counted = sum(seconds is None or now - at < seconds for at in self.deaths)
        allowed = self.restarts.allow("actor")
        world.note("dies", allowed)
        world.check((allowed is not None) == (counted < self.limit.max), "restart", counted, "of", self.limit, allowed)
        self.over = True
        if allowed is None:
            self.may_restart = False
            return
        world.check(allowed.number == counted + 1, "restart number", allowed, "after", counted)
        self.deaths.append(now)
        world.after(world.random.random(), self._begin)

    def _judge(self) -> None:
        check = self.world.check
        check(self.over, "the run stands still after step", self.step)
        check(self.spent <= 0.01 * self.ended + 0.4, "snapshots took", self.spent, "s of", self.ended)
        if not self.may_restart:
            return
        check(self.step == self.last, "the run ends after step", self.step)
        # Answers that a restart asks for again come last within their step.
        problems = [problem for step in sorted(self.learned) for problem in sorted(self.learned[step])]
        check(len(set(problems)) == len(problems), "learned from twice:", problems)
        if not self.refills:
            check(problems == list(range(self.batch * self.last)), "not learned from in order:", problems)
        batches = self.plan.state()["batches"]
        ahead = [place[0] for batch in batches for place in batch["waiting"]]
        ahead += [place[1] for batch in batches for place in batch["places"]]
        accounted = sorted([*ahead, *(problem for step in self.answered.values() for problem in step)])
        check(accounted == list(range(self.plan.taken)), "lost, or counted twice:", accounted, "of", self.plan.taken)
        check(self.staleness or self.learned == self._undisturbed(), "another course than without deaths")

    def _undisturbed(self) -> dict[int, list[int]]:
        plan, learned = self._plan(), dict[int, list[int]]()
        for step in range(1, self.last + 1):
            while not plan.is_whole(step):
                for prompt in plan.due(range(step, step + 1), step - 1):
                    worker: Any = Worker(self, prompt.worker)
                    worker._back = _Direct(plan)
                    worker._answer(prompt, step - 1)
            learned[step] = [report.problem for report in plan.take(step) if report.kept]
        return learned


class _Direct:
    """Stands for a wire that has no delay."""

    def __init__(self, plan: PromptPlan) -> None:
        self._plan = plan

    def send(self, report: GroupReport) -> None:
        self._plan.arrived(report)
