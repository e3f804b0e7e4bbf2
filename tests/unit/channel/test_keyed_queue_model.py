"""The queue machine against a model that is slow and obvious."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlinf_core.channel.keyed_queue import KeyedQueue
from rlinf_core.channel.queue_state import Accepted, Acknowledged, Delivered, Effect, Lost, Refused

KEYS = st.sampled_from(["x", "y"])
PARTIES = st.sampled_from(["p", "q", "r"])


@dataclass
class Put:
    op_id: int
    key: str
    owner: str
    value: int
    weight: int


@dataclass
class Get:
    op_id: int
    key: str
    owner: str
    need: int | None


class Model:
    """Keeps everything that was accepted and not delivered in one sorted list per key, and starts over at each step.

    What the get at the head "has reserved" is never stored: it is all of the list.
    """

    def __init__(self, maxsize: int) -> None:
        self.maxsize = maxsize
        self.closed = False
        self.pool: dict[str, list[tuple[int, Put]]] = {"x": [], "y": []}
        self.blocked: dict[str, list[Put]] = {"x": [], "y": []}
        self.gets: dict[str, list[Get]] = {"x": [], "y": []}
        self.delivered: dict[int, tuple[Get, list[tuple[int, Put]]]] = {}
        self.announced: dict[int, Put] = {}
        self.accepted = 0
        self.taken: list[int] = []
        self.messages: list[tuple[object, ...]] = []

    def settle(self, key: str) -> None:
        while self.step(key):
            pass

    def step(self, key: str) -> bool:
        pool, blocked, gets = self.pool[key], self.blocked[key], self.gets[key]
        if gets and pool:
            for count in range(1, len(pool) + 1):
                weight = sum(put.weight for _, put in pool[:count])
                if gets[0].need is None or weight >= gets[0].need:
                    self.deliver(key, count)
                    return True
        room = not self.maxsize or bool(gets) or len(pool) < self.maxsize
        if blocked and room:
            self.accept(blocked.pop(0))
            return True
        if self.closed and gets and pool:
            self.deliver(key, len(pool))
            return True
        if self.closed and gets and not any(get.key == key for get, _ in self.delivered.values()):
            self.messages.append(("closed", gets.pop(0).op_id))
            return True
        return False

    def accept(self, put: Put) -> None:
        self.pool[put.key].append((self.accepted, put))
        self.accepted += 1
        self.messages.append(("accepted", put.op_id))

    def deliver(self, key: str, count: int) -> None:
        get = self.gets[key].pop(0)
        items, self.pool[key] = self.pool[key][:count], self.pool[key][count:]
        self.delivered[get.op_id] = (get, items)
        self.messages.append(("delivered", get.op_id, tuple(put.value for _, put in items)))

    def take_back(self, op_id: int) -> str:
        get, items = self.delivered.pop(op_id)
        self.pool[get.key] = sorted(self.pool[get.key] + items, key=lambda entry: entry[0])
        return get.key

    def available(self, key: str) -> list[int]:
        return [] if self.gets[key] else [put.value for _, put in self.pool[key]]


def plain(effect: Effect[int]) -> tuple[object, ...]:
    match effect:
        case Accepted(op_id):
            return ("accepted", op_id)
        case Delivered(op_id, items):
            return ("delivered", op_id, tuple(item.payload for item in items))
        case Acknowledged(op_id, items):
            return ("taken", op_id, tuple(item.payload for item in items))
        case Refused(op_id, reason, _):
            return (reason.value, op_id)
        case Lost(op_id, key, producer, _):
            return ("lost", op_id, key, producer)


class QueueAgainstModel(RuleBasedStateMachine):
    @initialize(maxsize=st.integers(0, 3))
    def start(self, maxsize: int) -> None:
        self.real: KeyedQueue[int] = KeyedQueue(maxsize)
        self.model = Model(maxsize)
        self.op_ids = 0

    def op_id(self) -> int:
        self.op_ids += 1
        return self.op_ids

    def compare(self, effects: list[Effect[int]]) -> None:
        # The order of effects on different keys is free, so both sides are sorted.
        real = sorted((plain(effect) for effect in effects), key=repr)
        assert real == sorted(self.model.messages, key=repr)
        self.model.messages.clear()

    @rule(key=KEYS, owner=PARTIES, weight=st.integers(0, 3), announced=st.booleans(), wait=st.booleans())
    def put(self, key: str, owner: str, weight: int, announced: bool, wait: bool) -> None:
        op_id = self.op_id()
        model = self.model
        put = Put(op_id, key, owner, op_id * 10, weight)
        if announced:
            self.real.announce(op_id, key=key, producer=owner)
        if model.closed:
            model.messages.append(("closed", op_id))
        elif wait or not model.maxsize or len(model.available(key)) < model.maxsize:
            model.blocked[key].append(put)
            model.settle(key)
        else:
            model.messages.append(("full", op_id))
        self.compare(self.real.put(op_id, put.value, weight=weight, key=key, producer=owner, wait=wait))

    @rule(key=KEYS, owner=PARTIES)
    def announce(self, key: str, owner: str) -> None:
        op_id = self.op_id()
        self.real.announce(op_id, key=key, producer=owner)
        self.model.announced[op_id] = Put(op_id, key, owner, 0, 0)

    @rule(key=KEYS, owner=PARTIES, need=st.none() | st.integers(1, 5), wait=st.booleans())
    def get(self, key: str, owner: str, need: int | None, wait: bool) -> None:
        op_id = self.op_id()
        model = self.model
        get = Get(op_id, key, owner, need)
        model.gets[key].append(get)
        model.settle(key)
        if not wait and get in model.gets[key]:
            model.gets[key].remove(get)
            model.messages.append(("empty", op_id))
        self.compare(self.real.get(op_id, need, key=key, consumer=owner, wait=wait))

    @precondition(lambda self: self.model.delivered)
    @rule(data=st.data())
    def taken(self, data: st.DataObject) -> None:
        op_id = data.draw(st.sampled_from(sorted(self.model.delivered)))
        get, items = self.model.delivered.pop(op_id)
        values = [put.value for _, put in items]
        self.model.taken += values
        self.model.messages.append(("taken", op_id, tuple(values)))
        self.model.settle(get.key)
        self.compare(self.real.taken(op_id))

    @precondition(lambda self: self.op_ids)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        model = self.model
        op_id = data.draw(st.integers(1, self.op_ids))
        touched = model.announced.pop(op_id, None) is not None
        for key in ("x", "y"):
            for waiting in (model.blocked[key], model.gets[key]):
                for entry in [entry for entry in waiting if entry.op_id == op_id]:
                    waiting.remove(entry)  # pyright: ignore[reportArgumentType]
                    touched = True
        if op_id in model.delivered:
            model.take_back(op_id)
            touched = True
        if touched:
            model.messages.append(("cancelled", op_id))
        for key in ("x", "y"):
            model.settle(key)
        self.compare(self.real.cancel(op_id))

    @rule(owner=PARTIES)
    def die(self, owner: str) -> None:
        model = self.model
        lost = [put for put in model.announced.values() if put.owner == owner]
        for key in ("x", "y"):
            lost += [put for put in model.blocked[key] if put.owner == owner]
            model.blocked[key] = [put for put in model.blocked[key] if put.owner != owner]
            model.gets[key] = [get for get in model.gets[key] if get.owner != owner]
        model.announced = {op_id: put for op_id, put in model.announced.items() if put.owner != owner}
        model.messages += [("lost", put.op_id, put.key, owner) for put in lost]
        for op_id in [op_id for op_id, (get, _) in model.delivered.items() if get.owner == owner]:
            model.take_back(op_id)
        for key in ("x", "y"):
            model.settle(key)
        self.compare(self.real.remove(owner))

    @precondition(lambda self: self.op_ids > 8)
    @rule()
    def close(self) -> None:
        model = self.model
        model.closed = True
        for key in ("x", "y"):
            model.messages += [("closed", put.op_id) for put in model.blocked[key]]
            model.blocked[key] = []
            model.settle(key)
        self.compare(self.real.close())

    @invariant()
    def what_is_there(self) -> None:
        for key in ("x", "y"):
            available = self.model.available(key)
            assert [item.payload for item in self.real.peek_all(key)] == available
            assert self.real.depth(key) == len(available)

    @invariant()
    def every_accepted_item_is_in_one_place(self) -> None:
        statistics = self.real.statistics().values()
        under_way = [put.value for _, items in self.model.delivered.values() for _, put in items]
        pooled = [put.value for pool in self.model.pool.values() for _, put in pool]
        places = self.model.taken + under_way + pooled
        assert len(set(places)) == len(places) == sum(one.puts for one in statistics)
        assert sum(one.gets for one in statistics) == len(self.model.taken) + len(under_way)

    @invariant()
    def drained_means_that_nothing_can_come(self) -> None:
        busy = any(
            self.model.pool[key] or self.model.gets[key] or self.model.blocked[key] for key in ("x", "y")
        ) or bool(self.model.delivered)
        assert self.real.drained == (self.model.closed and not busy)


TestQueueAgainstModel = QueueAgainstModel.TestCase
