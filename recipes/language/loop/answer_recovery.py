"""Recovery of synchronous rollouts: only workers that died are restarted, and their share is repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

from recipes.language.answers.prompt_messages import GenerationReport, Prompt, ScoredGroup
from recipes.language.data.problems import problem_number
from recipes.language.loop.prompt_plan import PromptPlan
from recipes.language.loop.worker_groups import AnsweringGroup, GenerationGroup
from rlinf_core import Channel, Relaunching, WorkerDiedError, WorkerGroup, WorkerGroupError, WorkerGroupHandle
from rlinf_core.errors import RunError
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.recovery import Suspects, all_deaths, death
from rlinf_core.runners.run_program import Dead
from rlinf_core.worker.handle import wait_together

# A key of the answer channel that nobody reads.
_DRIVER: Final = "driver"


class Calls:
    """Calls of one method on the ranks of a group; failed calls are repeated.

    Args:
        group: the group.
        method: the name of the method.
    """

    def __init__(self, group: WorkerGroup[Any], method: str) -> None:
        self._group = group
        self._method = method
        self._whole: WorkerGroupHandle[Any] | None = None
        self._by_rank: dict[int, WorkerGroupHandle[Any]] = {}

    def begin(self, *args: object) -> Sequence[WorkerGroupHandle[Any]]:
        """Call the method on ranks without a call, and return the calls of all ranks."""
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
        """Drop the calls that failed, and those of `dead`, the ranks that were restarted."""
        whole, self._whole = self._whole, None
        if whole is not None:
            # From now on, the outcome of each rank counts.
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
        """Wait for all current calls."""
        wait_together(*self._by_rank.values())


class AnswerRecovery(Relaunching):
    """The recovery of synchronous generation and scoring, and of weight transfers to the engines.

    A restarted rollout worker samples its share again, with the actor's weights. A restarted reward worker scores its
    share again, which the answering workers resend.

    A prompt that was present at two deaths of rollout workers is tried alone, and quarantined if the worker dies again.

    Args:
        groups: the worker groups, by component.
        answering: the component whose workers answer. They are restarted here only if they hold the engines.
        record: the record of the run.
        suspects: the prompts that may have killed rollout workers.
    """

    def __init__(
        self, groups: Mapping[str, WorkerGroup[Any]], answering: str, record: RunRecord, suspects: SuspectedPrompts
    ) -> None:
        replaced = ("rollout", "reward") if answering == "rollout" else ("reward",)
        super().__init__({name: groups[name] for name in replaced}, record)
        self._all = groups
        self._suspects = suspects
        # The cause of the death being recovered from, and whether a prompt is being tried alone.
        self._reason, self._trying = "", False
        self._draws = answering == "rollout"
        self._answers = groups[answering]
        self._rewards = groups["reward"].world_size
        # The argument of `init_worker`, and the channel of answers.
        self._layout: object = None
        self._channel: Channel | None = None
        self._send_weights: Callable[[], Sequence[WorkerGroupHandle[Any]]] | None = None
        self._generating = self._scoring = Calls(groups["reward"], "score")
        self._asked: tuple[Prompt, ...] = ()
        # The slots whose answers reward workers hold for the current step.
        self._step = 0
        self._held: set[int] = set()
        self._syncing, self._repeated = False, False

    def prepared(
        self, layout: object, channel: Channel, send_weights: Callable[[], Sequence[WorkerGroupHandle[Any]]]
    ) -> None:
        """Keep the layout for `init_worker`, the channel of answers, and the function that sends weights to engines."""
        self._layout, self._channel, self._send_weights = layout, channel, send_weights
        # Make the driver a producer: a channel whose producers are all dead fails its readers, even if replacements
        # come.
        channel.put((), key=_DRIVER)

    def sync(self, attempt: Callable[[], None]) -> None:
        """Run a weight transfer, and repeat it after deaths."""
        self._syncing = True
        try:
            self.repeat(attempt)
        finally:
            self._syncing = False

    def try_suspects(self, rank: int = 0) -> None:
        """Have a rollout worker, whose engine has its weights, answer each suspected prompt alone."""
        self._suspects.try_each(lambda prompt: self._death_of(rank, prompt))

    def _death_of(self, rank: int, prompt: Prompt) -> str:
        """Have a worker answer a prompt alone; return the cause if it died and was restarted, else "".

        Raises:
            WorkerGroupError: the worker failed without dying, or no further restart is allowed.
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
            wait: waits for calls of generation, if rollout workers answer, and of scoring, and returns their results;
                by default `wait_together`.

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
        """Drop duplicate answers, which a later call of `score` would take for its own."""
        if self._channel is None:
            return
        for rank in range(self._rewards):
            while not self._channel.empty(key=str(rank)):
                self._channel.get_nowait(key=str(rank))

    def _attempt(
        self, wait: Callable[..., Sequence[Sequence[Any]]]
    ) -> tuple[list[GenerationReport], list[list[ScoredGroup]]]:
        generating = self._generating.begin(self._asked) if self._draws else ()
        # A restarted reward worker has lost the answers of this step.
        held = self._held if self._repeated else set[int]()
        scoring = self._scoring.begin(tuple(sorted({prompt.slot for prompt in self._asked} | held)))
        results = wait(*generating, *scoring)
        split = len(generating)
        return _flat(results[:split]), _flat(results[split:])

    def may_relaunch(self, dead: Dead) -> bool:
        # Actors gather shards while sending weights, so one may still wait for another that lost its peer.
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
        """Have the answers of restarted reward workers resent.

        Raises:
            RunError: some answers are lost with the worker that held them.
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
    """Return the cause of a worker's death, in one line; "" if none died."""
    cause = death(error)
    return "" if cause is None else str(cause).partition("\n")[0]


def _flat(results: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the results of calls, each on one or several ranks, as one list."""
    return [result for ranks in results for result in ranks]


def _spell(generating: Sequence[int], scoring: Sequence[int]) -> str:
    parts = [("the answers", generating), ("the scores", scoring)]
    return ", ".join(f"{what} of rank {', '.join(map(str, ranks))}" for what, ranks in parts if ranks)


class SuspectedPrompts:
    """The prompts that may have killed rollout workers, over all attempts of a run.

    Args:
        record: the record of the run, which keeps the prompts.
        data: the section `data` of the configuration.

    Attributes:
        problems: the number of training problems.
    """

    def __init__(self, record: RunRecord, data: Any) -> None:
        self._record = record
        self._data = data
        self.problems = 0
        self._suspects: Suspects[Prompt] = record.suspects

    @property
    def count(self) -> int:
        """The number of quarantined problems."""
        return len(self._suspects.set_aside)

    def died_of(self, prompts: Iterable[Prompt], reason: str) -> None:
        """Record the death of a worker that had these prompts."""
        self._suspects.died_of({self._name(prompt): prompt for prompt in prompts}, reason)

    @property
    def due(self) -> bool:
        """Whether prompts are to be tried alone."""
        return bool(self._suspects.due())

    def died_with(self, error: BaseException, group: str, plan: PromptPlan) -> None:
        """Record the prompts of those workers of a group whose deaths an error reports."""
        for address, cause in all_deaths(error).items():
            name, _, rank = address.rpartition(":")
            if name == group and rank.isdigit():
                self.died_of(plan.given_to({int(rank)}), str(cause).partition("\n")[0])

    def marked(self, prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
        """Return prompts, with quarantined ones marked."""
        aside = self._suspects.set_aside
        if not aside:
            return tuple(prompts)
        return tuple(prompt._replace(set_aside=self._name(prompt) in aside) for prompt in prompts)

    def try_each(self, dies_of: Callable[[Prompt], str]) -> None:
        """Try each due prompt alone.

        Args:
            dies_of: has a worker answer one prompt; returns the cause of its death, or "" if it lives.
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
        if not (prompt.trains and self.problems):
            return prompt.position
        return problem_number(self.problems, prompt.position, seed=self._data.seed, shuffle=self._data.reshuffles)

    def _name(self, prompt: Prompt) -> str:
        number = self.problem_of(prompt)
        return f"{number}" if prompt.trains else f"evaluation-{number}"
