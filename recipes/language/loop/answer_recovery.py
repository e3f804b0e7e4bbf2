"""Recovery of synchronous rollouts: workers that died are started again alone, and their share is done again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

from recipes.language.data.problems import training_order
from recipes.language.loop.protocols import AnsweringGroup, GenerationGroup
from recipes.language.prompts.prompt_messages import GenerationReport, Prompt, ScoredGroup
from recipes.language.prompts.prompt_plan import PromptPlan
from rlinf_core import Channel, Relaunching, WorkerDiedError, WorkerGroup, WorkerGroupError, WorkerGroupHandle
from rlinf_core.errors import RunError
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.recovery import Suspects, all_deaths, death
from rlinf_core.runners.run_program import Dead
from rlinf_core.worker.group.handle import wait_together

# Key of the channel of answers that nobody reads.
_DRIVER: Final = "driver"


class Calls:
    """The calls of one method on the ranks of a group, of which failed ones are repeated.

    Args:
        group: the group.
        method: its name.
    """

    def __init__(self, group: WorkerGroup[Any], method: str) -> None:
        self._group = group
        self._method = method
        self._whole: WorkerGroupHandle[Any] | None = None
        self._by_rank: dict[int, WorkerGroupHandle[Any]] = {}

    def begin(self, *args: object) -> Sequence[WorkerGroupHandle[Any]]:
        """Call the ranks that have no call; return the calls of all of them."""
        if self._whole is None and not self._by_rank:
            self._whole = getattr(self._group, self._method)(*args)
        if self._whole is not None:
            return [self._whole]
        for rank in self.missing:
            self._by_rank[rank] = getattr(self._group.execute_on(rank), self._method)(*args)
        return [self._by_rank[rank] for rank in sorted(self._by_rank)]

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks without a call."""
        return tuple(rank for rank in range(self._group.world_size) if rank not in self._by_rank)

    def drop_failed(self, dead: Sequence[int]) -> None:
        """Keep the calls of those that have answered, or still will; `dead` are ranks that were started again."""
        whole, self._whole = self._whole, None
        if whole is not None:
            # The ranks' own outcomes count from now on.
            whole.observed = True
            living = [(rank, one) for rank, one in enumerate(whole.references) if rank not in dead]
            self._by_rank = {
                rank: self._group.execute_on(rank).handle(self._method, [reference]) for rank, reference in living
            }
        for rank, call in list(self._by_rank.items()):
            if rank in dead or call.failed:
                call.observed = True
                del self._by_rank[rank]

    def wait(self) -> None:
        """Wait for the calls that there are."""
        wait_together(*self._by_rank.values())


class AnswerRecovery(Relaunching):
    """The recovery of generation and scoring in turns, and of the weights' way to the engines.

    A rollout worker that died draws its share again, with the weights that the actor has. A reward worker that died
    scores its share again, which those that answered put into the channel once more.

    A prompt that was there at two deaths of rollout workers is then tried alone, and set aside if it kills again.

    Args:
        groups: the worker groups, by component.
        answering: the component whose workers answer, where these hold the engines. Others are not started again here.
        record: the record of the run.
        suspects: the prompts that rollout workers died of.
    """

    def __init__(
        self, groups: Mapping[str, WorkerGroup[Any]], answering: str, record: RunRecord, suspects: SuspectedPrompts
    ) -> None:
        replaced = ("rollout", "reward") if answering == "rollout" else ("reward",)
        super().__init__({name: groups[name] for name in replaced}, record)
        self._all = groups
        self._suspects = suspects
        # How the worker died whose relaunch is under way, and whether that is of a prompt that is tried alone.
        self._reason, self._trying = "", False
        self._draws = answering == "rollout"
        self._answers = groups[answering]
        self._rewards = groups["reward"].world_size
        # What workers are prepared with, and the channel of answers.
        self._layout: object = None
        self._channel: Channel | None = None
        self._send_weights: Callable[[], Sequence[WorkerGroupHandle[Any]]] | None = None
        self._generating = self._scoring = Calls(groups["reward"], "score")
        self._asked: tuple[Prompt, ...] = ()
        # Slots whose answers reward workers hold, for the step that learns from them.
        self._step = 0
        self._held: set[int] = set()
        self._syncing, self._repeated = False, False

    def prepared(
        self, layout: object, channel: Channel, send_weights: Callable[[], Sequence[WorkerGroupHandle[Any]]]
    ) -> None:
        """Note what workers are prepared with, the channel of answers, and how engines are sent their weights."""
        self._layout, self._channel, self._send_weights = layout, channel, send_weights
        # A channel whose producers are all dead fails those that wait for their successors: the driver is one, too.
        channel.put((), key=_DRIVER)

    def sync(self, attempt: Callable[[], None]) -> None:
        """Have weights sent, again after deaths."""
        self._syncing = True
        try:
            self.repeat(attempt)
        finally:
            self._syncing = False

    def try_suspects(self, rank: int = 0) -> None:
        """Have a rollout worker answer each prompt alone that workers may have died of; engines have their weights."""
        self._suspects.try_each(lambda prompt: self._death_of(rank, prompt))

    def _death_of(self, rank: int, prompt: Prompt) -> str:
        """Have a worker answer a prompt alone; return how it died, and was started again, or "".

        Raises:
            WorkerGroupError: another failure, or no further restart is allowed.
        """
        self._trying = True
        try:
            cast("GenerationGroup", self._answers.execute_on(rank)).try_alone(prompt).wait()
        except WorkerGroupError as error:
            if not super().relaunch(error):
                raise
            return _reason(error)
        finally:
            self._trying = False
        return ""

    def relaunch(self, error: WorkerGroupError | WorkerDiedError) -> bool:
        self._reason = _reason(error)
        return super().relaunch(error)

    def answered(
        self, asked: tuple[Prompt, ...], wait: Callable[..., Sequence[Sequence[Any]]] | None = None
    ) -> tuple[list[GenerationReport], list[list[ScoredGroup]]]:
        """Have prompts answered and scored.

        Args:
            asked: the prompts.
            wait: returns the results of calls: of generation, where the engines' workers answer, and of scoring; by
                default when all have arrived.

        Returns:
            The metrics of each engine, and the groups of each reward worker.
        """
        step = asked[0].step if asked else 0
        if step != self._step:
            self._step, self._held = step, set[int]()
        self._asked, self._repeated = self._suspects.marked(asked), False
        self._generating, self._scoring = Calls(self._answers, "generate"), Calls(self._groups["reward"], "score")
        generated, scored = self.repeat(lambda: self._attempt(wait or wait_together))
        if self._repeated:
            self.drop_repeated()
        slots = {prompt.slot for prompt in asked}
        if step:
            self._held |= slots
        return generated, [[group for group in groups if group.report.slot in slots] for groups in scored]

    def drop_repeated(self) -> None:
        """Drop duplicate answers, which a later call of `score` would count as its own."""
        if self._channel is None:
            return
        for rank in range(self._rewards):
            while not self._channel.empty(key=str(rank)):
                self._channel.get_nowait(key=str(rank))

    def _attempt(
        self, wait: Callable[..., Sequence[Sequence[Any]]]
    ) -> tuple[list[GenerationReport], list[list[ScoredGroup]]]:
        generating = self._generating.begin(self._asked) if self._draws else ()
        # A reward worker that was started again holds nothing of this step.
        held = self._held if self._repeated else set[int]()
        scoring = self._scoring.begin(tuple(sorted({prompt.slot for prompt in self._asked} | held)))
        results = wait(*generating, *scoring)
        split = len(generating)
        return _flat(results[:split]), _flat(results[split:])

    def may_relaunch(self, dead: Dead) -> bool:
        # Shards of weights are gathered while they are sent: an actor may still wait for the one whose peer died.
        return self._channel is not None and not (self._syncing and self._all["actor"].world_size > 1)

    def prepare(self, dead: Dead) -> str:
        rollouts, send_weights = dead.get("rollout", ()), self._send_weights
        if send_weights is None:
            raise RuntimeError("called before the workers were prepared")
        wait_together(
            *(self._all[component].execute_on(*ranks).init_worker(self._layout) for component, ranks in dead.items())
        )
        if self._trying:
            wait_together(*send_weights())
            return ""
        if self._syncing:
            self._all["rollout"].drop_messages(self._all["actor"])
            return "the sync of weights"
        self._repeated = True
        self._scoring.drop_failed(dead.get("reward", ()))
        if self._draws:
            self._generating.drop_failed(rollouts)
        shares = self._generating.missing if self._draws else ()
        if rollouts:
            self._generating.wait()
            wait_together(*send_weights())
            self._suspects.died_of([prompt for prompt in self._asked if prompt.worker in rollouts], self._reason)
            self.try_suspects(rollouts[0])
            self._asked = self._suspects.marked(self._asked)
        if self._scoring.missing:
            self._put_again(shares)
        return _spell(shares, self._scoring.missing)

    def _put_again(self, missing: Sequence[int]) -> None:
        """Have the answers of reward workers that start again put into the channel once more.

        Raises:
            RunError: some are lost with the worker that gave them.
        """
        scoring = set(self._scoring.missing)
        slots = {prompt.slot for prompt in self._asked} | self._held
        wanted = {slot for slot in slots if slot % self._rewards in scoring}
        there = [rank for rank in range(self._answers.world_size) if rank not in missing]
        view = cast("AnsweringGroup", self._answers.execute_on(*there)) if there else None
        put = view.put_again(tuple(sorted(wanted))).wait() if view is not None else []
        follow = {prompt.slot for prompt in self._asked if prompt.worker in missing}
        if wanted - follow - {slot for share in put for slot in share}:
            raise RunError("answers of this step are lost with the worker that gave them")


def _reason(error: WorkerGroupError | WorkerDiedError) -> str:
    """Return how a worker died, in one line; empty where none did."""
    cause = death(error)
    return "" if cause is None else str(cause).partition("\n")[0]


def _flat(results: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the results of calls on several ranks or one each, by rank."""
    return [result for ranks in results for result in ranks]


def _spell(generating: Sequence[int], scoring: Sequence[int]) -> str:
    parts = [("the answers", generating), ("the scores", scoring)]
    return ", ".join(f"{what} of rank {', '.join(map(str, ranks))}" for what, ranks in parts if ranks)


class SuspectedPrompts:
    """The prompts of a run that rollout workers died of, over all its attempts.

    Args:
        record: the record of the run, which keeps them.
        data: the section `data` of the file.

    Attributes:
        problems: the number of problems for training.
    """

    def __init__(self, record: RunRecord, data: Any) -> None:
        self._record = record
        self._data = data
        self.problems = 0
        self._suspects: Suspects[Prompt] = record.suspects

    @property
    def count(self) -> int:
        """The number of problems that are set aside."""
        return len(self._suspects.set_aside)

    def died_of(self, prompts: Iterable[Prompt], reason: str) -> None:
        """Note the death of a worker that had these prompts."""
        self._suspects.died_of({self._name(prompt): prompt for prompt in prompts}, reason)

    @property
    def due(self) -> bool:
        """Whether prompts are to be tried alone."""
        return bool(self._suspects.due())

    def died_with(self, error: BaseException, group: str, plan: PromptPlan) -> None:
        """Record the prompts held by the workers of a group whose deaths a failure reports."""
        for address, cause in all_deaths(error).items():
            name, _, rank = address.rpartition(":")
            if name == group and rank.isdigit():
                self.died_of(plan.given_to({int(rank)}), str(cause).partition("\n")[0])

    def marked(self, prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
        """Return prompts with those marked that are set aside."""
        aside = self._suspects.set_aside
        if not aside:
            return tuple(prompts)
        return tuple(prompt._replace(set_aside=self._name(prompt) in aside) for prompt in prompts)

    def try_each(self, dies_of: Callable[[Prompt], str]) -> None:
        """Try each prompt alone that is due.

        Args:
            dies_of: has a worker answer one prompt; returns how it died, or "" where it lives.
        """
        for name, prompt in self._suspects.due().items():
            reason = dies_of(prompt)
            if reason:
                deaths = self._suspects.killed(name, reason)
                self._record.set_aside("prompt", name, prompt.step, deaths)
            else:
                self._suspects.lived(name)

    def problem_of(self, prompt: Prompt) -> int:
        """Return the number of a prompt's problem in its set."""
        index = prompt.position
        if prompt.trains and self.problems:
            data = self._data
            (index,) = training_order(self.problems, index, 1, seed=data.seed, shuffle=data.reshuffles)
        return index

    def _name(self, prompt: Prompt) -> str:
        number = self.problem_of(prompt)
        return f"{number}" if prompt.trains else f"evaluation-{number}"
