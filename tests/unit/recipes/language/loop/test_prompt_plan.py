"""Which prompts are answered when, and what is learned from: the plan alone, and with simulated engines."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.language.answers.prompt_messages import GroupReport, Prompt, assign, staleness
from recipes.language.loop.prompt_plan import Curriculum, PromptPlan
from tests.unit.recipes.language.tiny import report


def made(**options: int) -> PromptPlan:
    known = {"batch_size": 3, "max_staleness": 0, "max_refills": 0, "workers": 2, "answers": 2, **options}
    return PromptPlan(**known, temperature=1.0, shown=lambda step: 1)


def answered(
    prompt: Prompt, versions: tuple[int, ...] = (0,), *, dropped: bool = False, spoiled: bool = False
) -> GroupReport:
    """Return the report about a prompt's answers, by the versions of their tokens."""
    ages = {"oldest": min(versions), "version_sum": sum(versions), "lengths": (len(versions),)}
    fate = {"failures": {"engine": 2} if spoiled else {}, "dropped": dropped, "spoiled": spoiled}
    rewards = (0.0, 0.0 if dropped else 1.0)
    known: dict[str, Any] = {"step": prompt.step, "problem": prompt.position, **ages, **fate}
    return report(prompt.slot, rewards, len(versions) + 1, **known)


def arrive(plan: PromptPlan, prompts: Iterable[Prompt]) -> None:
    for prompt in prompts:
        plan.arrived(answered(prompt))


def stored(plan: PromptPlan, unfinished: dict[int, int | None] | None = None) -> Any:
    """Return the state of a plan as a checkpoint has it."""
    return json.loads(json.dumps(plan.state(unfinished or {})))


def test_synchronous_step_deals_the_next_problems_to_workers() -> None:
    plan = made()
    first = plan.due(range(1, 2), 0)
    arrive(plan, first)
    dealt = [(item.slot, item.position, item.worker, item.shown) for item in first]
    assert dealt == [(0, 0, 0, True), (1, 1, 1, False), (2, 2, 0, False)]
    assert [item.problem for item in plan.take(1)] == [0, 1, 2]
    assert [(item.slot, item.position) for item in plan.due(range(2, 3), 1)] == [(0, 3), (1, 4), (2, 5)]


def test_dropped_groups_are_replaced_together_and_only_so_often() -> None:
    plan = made(max_refills=1)
    first = plan.due(range(1, 2), 0)
    plan.arrived(answered(first[0], dropped=True))
    # In synchronous mode what is answered together does not depend on who is first.
    assert plan.due(range(1, 2), 0) == []
    plan.arrived(answered(first[1], dropped=True))
    plan.arrived(answered(first[2]))
    second = plan.due(range(1, 2), 0)
    assert [item.position for item in second] == [3, 4]
    assert not {item.slot for item in second} & {item.slot for item in first}
    plan.arrived(answered(second[0], dropped=True))
    plan.arrived(answered(second[1]))
    assert plan.due(range(1, 2), 0) == []
    assert [item.problem for item in plan.take(1) if item.kept] == [2, 4]


@pytest.mark.parametrize(("max_refills", "refilled"), [(0, 4), (2, 4), (6, 6)])
def test_spoiled_groups_are_refilled_even_without_filters(max_refills: int, refilled: int) -> None:
    plan = made(batch_size=1, max_refills=max_refills)
    positions: list[int] = []
    while prompts := plan.due(range(1, 2), 0):
        (prompt,) = prompts
        positions.append(prompt.position)
        plan.arrived(answered(prompt, spoiled=True))
    assert positions == list(range(refilled + 1))
    # Nothing of them is learned from, and every failure is counted.
    reports = plan.take(1)
    assert [report.kept for report in reports] == [False] * (refilled + 1)
    assert sum(report.failed for report in reports) == 2 * (refilled + 1)


def test_a_spoiled_group_makes_room_for_a_whole_one() -> None:
    plan = made(max_staleness=1)
    first = plan.due(range(1, 2), 0)
    plan.arrived(answered(first[0], spoiled=True))
    (again,) = plan.due(range(1, 2), 0)
    arrive(plan, (*first[1:], again))
    assert [item.problem for item in plan.take(1) if item.kept] == [1, 2, 3]


def test_asynchronous_mode_replaces_a_dropped_group_at_once() -> None:
    plan = made(max_staleness=1, max_refills=1)
    first = plan.due(range(1, 3), 0)
    assert [item.step for item in first] == [1, 1, 1, 2, 2, 2]
    plan.arrived(answered(first[0], dropped=True))
    assert [(item.position, item.step) for item in plan.due(range(1, 3), 0)] == [(6, 1)]


def test_later_steps_need_newer_weights() -> None:
    plan = made(max_staleness=2)
    assert {(item.step, item.version) for item in plan.due(range(5, 8), 4)} == {(5, 2), (6, 3), (7, 4)}


def test_a_worker_with_much_to_do_gets_nothing_new() -> None:
    plan = made(workers=3, max_staleness=1, batch_size=4)
    first = plan.due(range(1, 2), 0)
    for prompt in first:
        if prompt.worker:
            plan.arrived(answered(prompt))
    assert Counter(item.worker for item in first) == {0: 2, 1: 1, 2: 1}
    assert Counter(item.worker for item in plan.due(range(1, 3), 0)) == {1: 2, 2: 2}


def test_a_report_of_nothing_that_was_asked_is_refused() -> None:
    plan = made()
    (prompt, *_) = plan.due(range(1, 2), 0)
    plan.arrived(answered(prompt))
    with pytest.raises(ValueError, match="slot 0 of step 1"):
        plan.arrived(answered(prompt))


def test_checkpoint_restores_the_buffer_and_asks_for_the_rest() -> None:
    plan = made(max_staleness=1, max_refills=1)
    first = plan.due(range(1, 3), 0)
    arrive(plan, first[:3])
    plan.take(1)
    plan.arrived(answered(first[3]))
    plan.arrived(answered(first[4], dropped=True))
    again = made(max_staleness=1, max_refills=1)
    restored = again.restore(stored(plan), step=1, version=1)
    # One group is there, one prompt was under way; the replacement of the dropped one was never handed out.
    assert restored[:3] == ((first[3].slot,), (), 1)
    due = again.due(range(2, 4), 1)
    assert [(item.position, item.step) for item in due if item.step == 2] == [(5, 2), (6, 2)]
    assert len({item.slot for item in due} | {first[3].slot, first[4].slot}) == len(due) + 2
    assert again.taken == 10


def test_checkpointed_prompts_continue_unless_too_old() -> None:
    plan = made(max_staleness=2)
    prompts = plan.due(range(1, 4), 0)
    arrive(plan, prompts[:4])
    plan.take(1)
    # The first of these has arrived meanwhile, the last was not begun.
    *_, last = positions = [prompt.position for prompt in prompts[3:]]
    kept: dict[int, int | None] = {**dict.fromkeys(positions, 0), positions[1]: 1, last: None}
    state = stored(plan, kept)

    again = made(max_staleness=2)
    restored = again.restore(state, step=1, version=1)

    assert restored[:3] == ((prompts[3].slot,), tuple(positions[1:-1]), 1)
    names = {prompt.position: f"prompt {prompt.position} for step {prompt.step}" for prompt in prompts}
    assert restored.fates == plan.in_flight_at_checkpoint(kept)
    assert restored.fates == {
        "restored": [names[prompts[3].position]],
        "continued": [names[position] for position in positions[1:-1]],
        "done again": [names[last]],
    }
    due = again.due(range(2, 5), 1)
    assert {item.position for item in due if item.begun} == set(positions[1:-1])
    # Those of step 3 were drawn by weights that are two versions older than those that learn from them.
    younger = made(max_staleness=1)
    assert younger.restore(state, step=1, version=1).continued == tuple(positions[1:3])


def test_restored_groups_beyond_a_smaller_bound_are_redone() -> None:
    plan = made(max_staleness=2)
    arrive(plan, plan.due(range(1, 4), 0))
    plan.take(1)
    again = made(max_staleness=1)
    restored = again.restore(plan.state(), step=1, version=1)
    assert len(restored.slots) == 3  # those of step 2, which are one version old then
    assert restored.again == 3
    assert {fate: len(items) for fate, items in restored.fates.items()} == {"restored": 3, "done again": 3}
    assert {fate: len(items) for fate, items in plan.in_flight_at_checkpoint({}).items()} == {"restored": 6}
    assert [item.version for item in again.due(range(2, 4), 1) if item.step == 3] == [1, 1, 1]


def test_staleness_counts_tokens() -> None:
    prompt = made().due(range(1, 2), 0)[0]
    assert staleness([answered(prompt, (1, 1, 3)), answered(prompt, (3,))], 3) == (1.0, 2)
    assert staleness([], 3) == (0.0, 0)


@dataclass
class Engines:
    """Engines that draw tokens of random numbers of answers at a time, and load weights late."""

    rng: random.Random
    version: int = 0
    offered: int = 0
    waiting: list[Prompt] = field(default_factory=list[Prompt])
    running: dict[int, tuple[Prompt, int, list[int]]] = field(default_factory=dict)
    begun: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def ask(self, prompts: list[Prompt]) -> None:
        self.waiting += prompts

    def tick(self, dropping: float) -> list[GroupReport]:
        """Draw tokens of some prompts, or load weights; sometimes nothing happens."""
        if self.rng.random() < 0.3:
            self.version = self.rng.randint(self.version, self.offered)
        begun = [item for item in self.waiting if item.version <= self.version and self.rng.random() < 0.7]
        self.waiting = [item for item in self.waiting if item not in begun]
        for prompt in begun:
            assert prompt.slot not in self.running
            drawn = [*self.begun[prompt.position]] if prompt.begun else []
            self.running[prompt.slot] = prompt, max(len(drawn) + 1, min(40, int(self.rng.paretovariate(1.0)))), drawn
        done: list[GroupReport] = []
        for slot, (prompt, length, versions) in list(self.running.items()):
            if self.rng.random() < 0.8:
                versions.append(self.version)
            if len(versions) == length:
                del self.running[slot]
                done.append(answered(prompt, tuple(versions), dropped=self.rng.random() < dropping))
        # What is left to load comes at last, as every message does.
        if not self.running and not begun and self.waiting:
            self.version = max(self.version, min(self.offered, self.version + 1))
        return done


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    bound=st.integers(0, 4),
    batch=st.integers(1, 6),
    workers=st.integers(1, 4),
    refills=st.integers(0, 3),
    dropping=st.sampled_from([0.0, 0.3, 0.9]),
    stopped=st.integers(0, 7),
)
def test_tokens_stay_within_the_bound_and_prompts_come_once(
    seed: int, bound: int, batch: int, workers: int, refills: int, dropping: float, stopped: int
) -> None:
    """Steps of a trainer with engines that are fast, slow and late, stopped and resumed once."""
    rng, last = random.Random(seed), 8

    def plan_made() -> PromptPlan:
        return made(batch_size=batch, max_staleness=bound, max_refills=refills, workers=workers, answers=1)

    plan, engines = plan_made(), Engines(rng)
    seen: Counter[int] = Counter()
    for version, step in enumerate(range(1, last + 1)):
        steps = range(step, min(step + bound, last) + 1)
        engines.offered = version
        engines.ask(plan.due(steps, version))
        while not plan.is_whole(step):
            for item in engines.tick(dropping):
                plan.arrived(item)
            engines.ask(plan.due(steps, version))
            assert len(plan.buffered) <= batch * (bound + 1)
        groups = plan.take(step)
        kept = [group for group in groups if group.kept]
        assert len(kept) <= batch
        assert len(kept) == batch or refills == 0 or dropping
        assert staleness(kept, version)[1] <= bound
        seen.update(group.problem for group in groups)
        if step == stopped:
            begun = {prompt.position: drawn for prompt, _, drawn in engines.running.values()}
            state = stored(plan, {name: min(drawn, default=None) for name, drawn in begun.items()})
            under_way = plan.in_flight
            plan, engines = plan_made(), Engines(rng, step, step, begun=begun)
            restored = plan.restore(state, step, step)
            assert restored.again + len(restored.continued) == under_way
            assert set(restored.continued) == {name for name, drawn in begun.items() if drawn}
    # Every prompt was taken once, and every one that was set aside was learned from or dropped as its report says.
    assert seen == Counter(range(plan.taken))


def learned(plan: PromptPlan, step: int, right: Callable[[int], float]) -> list[int]:
    """Return the problems of a step in which a share of two answers to each is right."""
    prompts = plan.due(range(step, step + 1), step - 1)
    for prompt in prompts:
        correct = tuple(number < 2 * right(prompt.position % 6) for number in range(2))
        plan.arrived(answered(prompt)._replace(problem=prompt.position % 6, corrects=correct))
    plan.take(step)
    return [prompt.position % 6 for prompt in prompts]


def curriculum(rests: int = 2) -> Curriculum:
    return Curriculum(low=0.1, high=0.9, rests=rests, problems=6, seed=0, shuffle=False)


def test_problems_too_easy_or_too_hard_rest_for_a_while() -> None:
    plan = made(batch_size=6)
    plan.curriculum = curriculum()
    shares = [0.0, 0.5, 1.0, 0.5, 0.5, 0.5]
    assert learned(plan, 1, shares.__getitem__) == [0, 1, 2, 3, 4, 5]
    # 0 and 2 rest in the second and the third epoch.
    assert learned(plan, 2, shares.__getitem__) == [1, 3, 4, 5, 1, 3]
    assert learned(plan, 3, shares.__getitem__) == [4, 5, 0, 1, 2, 3]
    assert plan.curriculum.passed_over == 4


def test_a_curriculum_goes_on_where_everything_rests() -> None:
    plan = made(batch_size=6)
    plan.curriculum = curriculum(rests=9)
    for step in (1, 2, 3):
        assert sorted(learned(plan, step, lambda problem: 1.0)) == [0, 1, 2, 3, 4, 5]


def test_a_restored_curriculum_passes_over_the_same() -> None:
    shares = [0.0, 0.5, 1.0, 0.5, 0.5, 0.5]
    plan, other = made(batch_size=6), made(batch_size=6)
    plan.curriculum, other.curriculum = curriculum(), curriculum()
    learned(plan, 1, shares.__getitem__)
    other.restore(stored(plan), 1, 1)
    assert learned(other, 2, shares.__getitem__) == learned(plan, 2, shares.__getitem__)
    assert other.curriculum.state() == plan.curriculum.state()


def test_what_waits_longer_than_one_checkpoint_begins_again() -> None:
    """A run goes on with a smaller `max_staleness`, and is saved again before it asks what an engine had begun."""
    plan = made(batch_size=2, max_staleness=2)
    prompts = plan.due(range(1, 4), 0)
    arrive(plan, prompts[:2])
    plan.take(1)
    first = plan.state({prompts[4].position: 1, prompts[5].position: None})
    second = made(batch_size=2, max_staleness=1)
    restored = second.restore(json.loads(json.dumps(first)), 1, 1)
    assert restored.continued == (prompts[4].position,)
    assert {prompt.position for prompt in second.due(range(2, 3), 1)} == {2, 3}
    third = made(batch_size=2, max_staleness=1)
    again = third.restore(stored(second), 1, 1)
    assert {fate: len(items) for fate, items in again.fates.items()} == {"done again": 2, "not yet asked": 2}
    # Nothing of its answers is in the second checkpoint: an engine would wait for them without an end.
    assert [(item.position, item.begun) for item in third.due(range(2, 4), 1)] == [(n, False) for n in (2, 3, 4, 5)]


def test_the_three_sets_are_all_that_was_set_aside() -> None:
    plan = made(batch_size=3, max_staleness=1, max_refills=1)
    prompts = plan.due(range(1, 3), 0)
    plan.arrived(answered(prompts[0]))
    plan.arrived(answered(prompts[1], dropped=True))
    unfinished = {prompts[2].position: 0, prompts[3].position: None}
    fates = plan.in_flight_at_checkpoint(unfinished)
    counts = {fate: len(items) for fate, items in fates.items()}
    assert counts == {"restored": 2, "continued": 1, "done again": 3, "not yet asked": 1}
    assert sum(map(len, fates.values())) == plan.taken
    other = made(batch_size=3, max_staleness=1, max_refills=1)
    assert other.restore(stored(plan, unfinished), 0, 0).fates == fates


@pytest.mark.parametrize("minibatches", [1, 2, 5])
def test_optimizer_steps_use_equal_groups_on_any_actor_count(minibatches: int) -> None:
    rng = random.Random(0)
    groups = [report(slot, (), rng.randrange(1, 90)) for slot in range(40)]
    alone = assign(groups, 1, minibatches)[0]
    assert sorted(slot for part in alone for slot in part) == list(range(40))
    assert {len(part) for part in alone} == {40 // minibatches}
    for actors in (2, 3, 8):
        dealt = assign(groups, actors, minibatches)
        together = [sorted(slot for rank in dealt for slot in rank[number]) for number in range(minibatches)]
        assert together == [list(part) for part in alone]
        assert dealt == assign(groups[::-1], actors, minibatches)


def test_tokens_are_balanced_between_steps_and_actors() -> None:
    rng = random.Random(1)
    groups = [report(slot, (), rng.randrange(1, 90)) for slot in range(64)]
    dealt = assign(groups, 4, 2)
    loads = [[sum(groups[slot].tokens for slot in part) for part in rank] for rank in dealt]
    steps = [sum(column) for column in zip(*loads, strict=True)]
    assert max(steps) - min(steps) < 90
    for column in zip(*loads, strict=True):
        assert max(column) - min(column) < 90


def test_fewer_groups_than_optimizer_steps_leave_some_without() -> None:
    assert assign([report(3)], 2, 2) == (((3,), ()), ((), ()))
