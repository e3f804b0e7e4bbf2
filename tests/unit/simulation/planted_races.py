"""Mistakes that the simulation must find: each puts one of them into the code that it runs."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rlinf_core.channel.broker.broker import Broker
from rlinf_core.channel.keyed_queue import KeyedQueue
from rlinf_core.channel.queue_state import Announced, Delivery, Put, Reason, Refused
from rlinf_core.collective.transfer.peer_stream import PeerStreams
from tests.unit.simulation.channel_run import ChannelRun

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
    stream.outgoing.connection = connection


_ask = QUEUE._ask


def _keep_what_an_impatient_batch_reserved(self: Any, op_id: Any, need: Any, key: Any, *others: Any) -> Any:
    give_back, self._give_back = self._give_back, lambda *_: None
    try:
        return _ask(self, op_id, need, key, *others)
    finally:
        self._give_back = give_back


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
    "impatient-batch-keeps": Planted(ChannelRun, KeyedQueue, "_ask", _keep_what_an_impatient_batch_reserved),
    "predecessor-stays": Planted(ChannelRun, Broker, "_admit", _admit_beside_its_predecessor),
    "bytes-not-counted-back": Planted(ChannelRun, Broker, "_drop", _drop_without_counting),
    "late-words-believed": Planted(ChannelRun, PeerStreams, "bind", _believe_late_words),
}
