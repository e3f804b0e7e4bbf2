"""Mistakes that the simulation must find: each puts one of them into the code that it runs."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from recipes.agent.task_calls import TaskCalls
from recipes.language.loop.prompt_plan import PromptPlan
from rlinf_core.address import WorkerAddress
from rlinf_core.channel.broker import Broker
from rlinf_core.channel.keyed_queue import KeyedQueue
from rlinf_core.channel.queue_state import Announced, Delivery, Put, Reason, Refused
from rlinf_core.collective.transfer.peer_streams import PeerStreams
from rlinf_core.runners.recovery import Restart, Restarts, SnapshotSchedule
from rlinf_core.supervision.lives import WorkerRegistry
from rlinf_core.supervision.manager import Manager
from rlinf_core.supervision.wait_graph import WaitGraph
from rlinf_core.supervision.waits import Watch
from tests.unit.simulation.channel_run import ChannelRun
from tests.unit.simulation.manager_run import ManagerRun
from tests.unit.simulation.plan_run import PlanRun
from tests.unit.simulation.task_run import TaskRun

QUEUE: Any = KeyedQueue


class Planted(NamedTuple):
    """A mistake: the method of a class that is replaced, and the scenario in which it shows."""

    scenario: Callable[..., Any]
    owner: Any
    method: str
    wrong: Callable[..., Any]


def _drop_returned(self: Any, queue: Any, returned: Any, now: float, effects: Any) -> None:
    self._settle(queue, now, effects)


def _return_to_the_tail(self: Any, queue: Any, returned: Any, now: float, effects: Any) -> None:
    queue.items.extend(returned)
    self._settle(queue, now, effects)


_remove = QUEUE.remove


def _forget_deliveries_of_the_dead(self: Any, owner: Any, now: float = 0.0) -> Any:
    for op_id in list(self._owned.get(owner, ())):
        if isinstance(self._entries[op_id], Delivery):
            self._leave(op_id, owner)
    return _remove(self, owner, now)


def _keep_what_the_dead_asked(self: Any, owner: Any, now: float = 0.0) -> Any:
    for op_id in list(self._owned.get(owner, ())):
        if isinstance(self._entries[op_id], Put | Announced):
            continue
        return []
    return _remove(self, owner, now)


_withdraw = QUEUE._withdraw


def _count_withdrawn_as_under_way(self: Any, op_id: Any, entry: Any, now: float) -> Any:
    returned = _withdraw(self, op_id, entry, now)
    entry.queue.delivering += isinstance(entry, Delivery)
    return returned


_taken = QUEUE.taken


def _tell_nobody_of_the_last_receipt(self: Any, op_id: Any, now: float = 0.0) -> Any:
    settle, self._settle = self._settle, lambda *_: None
    try:
        return _taken(self, op_id, now)
    finally:
        self._settle = settle


_cancel = QUEUE.cancel


def _refuse_and_keep(self: Any, op_id: Any, now: float = 0.0) -> Any:
    entry = self._entries.get(op_id)
    return [Refused(op_id, Reason.CANCELLED)] if isinstance(entry, Put) else _cancel(self, op_id, now)


_close = QUEUE.close


def _close_without_refusing(self: Any, now: float = 0.0) -> Any:
    return [effect for effect in _close(self, now) if not isinstance(effect, Refused) or effect.dropped is None]


_settle = QUEUE._settle


def _let_the_last_in_first(self: Any, queue: Any, now: float, effects: Any) -> None:
    for op_id in list(reversed(queue.blocked))[1:]:
        queue.blocked.move_to_end(op_id)
    _settle(self, queue, now, effects)


def _admit_beside_its_predecessor(self: Any, stream: Any) -> Any:
    self._clients.pop(stream.peer, None)
    return _admit(self, stream)


_admit: Any = Broker._admit


def _drop_without_counting(self: Any, payload: Any) -> None:
    del self, payload


def _believe_late_words(self: Any, stream: Any, connection: Any) -> None:
    stream.incarnation = connection.peer.incarnation
    stream.connection = connection


_get = QUEUE.get


def _keep_what_an_impatient_batch_reserved(self: Any, op_id: Any, need: Any = None, **others: Any) -> Any:
    give_back, self._give_back = self._give_back, lambda *_: None
    try:
        return _get(self, op_id, need, **others)
    finally:
        self._give_back = give_back


# The manager


def _reopen_before_the_news(self: Any, caller: Any, name: str) -> Any:
    return self._registry.reopen(_address(name))


_address: Any = WorkerAddress.from_name


def _tell_acquaintances_alone(self: Any, peer: Any, died: Any) -> None:
    for name in peer.acquaintances:
        self._tell(name, "died", died)


def _never_try_again(self: Any) -> None:
    del self


def _stop_to_look(self: Any, round_: Any) -> None:
    _watch_look(self, round_)
    self._looking = True


_watch_look: Any = Watch._look


def _count_the_unknown_as_waiting(self: Any, moving: Any) -> Any:
    return (node for node in _free(self, moving) if node[0] in self._processes)


_free: Any = WaitGraph._free


def _reopen_under_the_same_number(self: Any, address: Any) -> int:
    number = _reopen(self, address) - 1
    self._incarnations[address.root_group_name] = number
    self._store(replace(self.record(address), incarnation=number))
    return number


_reopen: Any = WorkerRegistry.reopen


# Plan, restarts, snapshots


_restore: Any = PromptPlan.restore


def _restore_from_the_first_problem(self: Any, state: Any, step: int, version: int) -> Any:
    return _restore(self, {**state, "problems_taken": len(state["batches"])}, step, version)


def _restore_slots_from_zero(self: Any, state: Any, step: int, version: int) -> Any:
    restored = _restore(self, state, step, version)
    self._slots, self._free = itertools.count(), []
    return restored


def _hand_out_too_old(self: Any, batch: Any, place: Any, version: int) -> Any:
    return _hand_out(self, batch, place, max(0, version - 1))


_hand_out: Any = PromptPlan._hand_out


def _forget_those_that_wait(self: Any, unfinished: Any = None) -> Any:
    state = _state(self, unfinished)
    for batch in state["batches"]:
        answered = [report["slot"] for report in batch["reports"]]
        batch["places"] = [place for place in batch["places"] if place[0] in answered]
    return state


_state: Any = PromptPlan.state


def _count_for_ever(self: Any, component: str) -> Any:
    times = self._times.setdefault(component, [])
    times.append(0.0)
    return Restart(len(times), self._limit.max) if len(times) <= self._limit.max else None


def _allow_one_more(self: Any, component: str) -> Any:
    times = self._times.get("", [])
    return _allow(self, component) or (Restart(len(times) + 1, self._limit.max) if not times else None)


_allow: Any = Restarts.allow


@contextmanager
def _never_rest(self: Any) -> Any:
    yield
    self._next = 0.0


# Tasks of agents


_call_tasks: Any = TaskCalls._call


def _run_suspects_in_company(self: Any, ranks: Any, tasks: Any, **_: Any) -> None:
    _call_tasks(self, ranks, tasks)


def _suspect_nothing(self: Any, task: Any, reason: str) -> bool:
    del self, task, reason
    return False


_is_suspected: Any = TaskCalls._is_suspected


def _blame_the_first_that_was_there_twice(self: Any, task: Any, reason: str) -> bool:
    self._deaths.died_of({str(task.slot): task}, reason)
    return _is_suspected(self, task, reason)


def _take_a_process_for_alive(self: Any) -> bool:
    idle = [rank for rank in self._alive if all(rank not in call.ranks for call in self._calls)]
    self._answering = idle[0] if idle else None
    return _tasks_done(self)


_tasks_done: Any = TaskCalls.done


def _forget_who_was_started_again(self: Any, error: Any, call: Any) -> None:
    _after(self, error, call._replace(lives=tuple(self._lives[rank] for rank in call.ranks)))


_after: Any = TaskCalls._after


PLANTED = {
    "returned-dropped": Planted(ChannelRun, KeyedQueue, "_give_back", _drop_returned),
    "returned-last": Planted(ChannelRun, KeyedQueue, "_give_back", _return_to_the_tail),
    "dead-keep-deliveries": Planted(ChannelRun, KeyedQueue, "remove", _forget_deliveries_of_the_dead),
    "dead-keep-gets": Planted(ChannelRun, KeyedQueue, "remove", _keep_what_the_dead_asked),
    "withdrawn-under-way": Planted(ChannelRun, KeyedQueue, "_withdraw", _count_withdrawn_as_under_way),
    "receipt-untold": Planted(ChannelRun, KeyedQueue, "taken", _tell_nobody_of_the_last_receipt),
    "cancelled-put-kept": Planted(ChannelRun, KeyedQueue, "cancel", _refuse_and_keep),
    "closed-puts-wait": Planted(ChannelRun, KeyedQueue, "close", _close_without_refusing),
    "blocked-reversed": Planted(ChannelRun, KeyedQueue, "_settle", _let_the_last_in_first),
    "impatient-batch-keeps": Planted(ChannelRun, KeyedQueue, "get", _keep_what_an_impatient_batch_reserved),
    "predecessor-stays": Planted(ChannelRun, Broker, "_admit", _admit_beside_its_predecessor),
    "bytes-not-counted-back": Planted(ChannelRun, Broker, "_drop", _drop_without_counting),
    "late-words-believed": Planted(ChannelRun, PeerStreams, "bind", _believe_late_words),
    "successor-before-news": Planted(ManagerRun, Manager, "reopen", _reopen_before_the_news),
    "driver-untold": Planted(ManagerRun, Manager, "_announce_death", _tell_acquaintances_alone),
    "lookups-forgotten": Planted(ManagerRun, Manager, "_retry_pending", _never_try_again),
    "watch-sleeps": Planted(ManagerRun, Watch, "_look", _stop_to_look),
    "unknown-waits": Planted(ManagerRun, WaitGraph, "_free", _count_the_unknown_as_waiting),
    "same-incarnation": Planted(ManagerRun, WorkerRegistry, "reopen", _reopen_under_the_same_number),
    "restored-twice": Planted(PlanRun, PromptPlan, "restore", _restore_from_the_first_problem),
    "slots-twice": Planted(PlanRun, PromptPlan, "restore", _restore_slots_from_zero),
    "weights-too-old": Planted(PlanRun, PromptPlan, "_hand_out", _hand_out_too_old),
    "under-way-forgotten": Planted(PlanRun, PromptPlan, "state", _forget_those_that_wait),
    "restarts-never-expire": Planted(PlanRun, Restarts, "allow", _count_for_ever),
    "restart-too-many": Planted(PlanRun, Restarts, "allow", _allow_one_more),
    "suspects-in-company": Planted(TaskRun, TaskCalls, "_call", _run_suspects_in_company),
    "nothing-suspected": Planted(TaskRun, TaskCalls, "_is_suspected", _suspect_nothing),
    "blamed-too-early": Planted(TaskRun, TaskCalls, "_is_suspected", _blame_the_first_that_was_there_twice),
    "dead-while-idle": Planted(TaskRun, TaskCalls, "done", _take_a_process_for_alive),
    "successor-ended": Planted(TaskRun, TaskCalls, "_after", _forget_who_was_started_again),
    "snapshots-without-rest": Planted(PlanRun, SnapshotSchedule, "saving", _never_rest),
}
