"""The queues of one channel as a pure state machine: commands in, effects out; no clock, no thread, no I/O.

Each key has its own queue. Per key:

* items leave in the order in which they were accepted, and waiting gets are served first come, first served;
* while a get waits, the queue has no free items: every item goes to the get at the head, which for a batch reserves
  items until their weights reach the batch weight, so two batches never interleave;
* `maxsize` bounds the items that are not reserved; a put beyond it waits, and blocks no other key;
* while the queues are held back, for example for lack of memory, a put waits until a get needs its item.

A delivered item is kept until its consumer calls `taken`: if the consumer dies before, the item goes back to its
place. So on a closed channel the last gets wait for pending deliveries before they raise `ChannelClosed`.

Every operation takes amortised constant time, whatever the number of keys, waiters and items.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from rlinf_core.channel.queue_state import (
    DEFAULT_KEY,
    Accepted,
    Acknowledged,
    Announced,
    Delivered,
    Delivery,
    Effect,
    Entry,
    Get,
    KeyStatistics,
    Lost,
    OpId,
    OwnerId,
    Put,
    Queue,
    QueuedItem,
    Reason,
    Refused,
)

T = TypeVar("T")

# The most empty keys whose statistics are kept; those of the least recently used keys are dropped.
_REMEMBERED_KEYS = 10_000


class KeyedQueue(Generic[T]):
    """The queues of one channel, one for each key.

    Every command returns the effects to carry out, in order. `now` is the caller's monotonic clock in seconds, used
    only for statistics. The caller handles deadlines: it calls `cancel` when one has passed. Weights and bounds were
    checked before.
    """

    def __init__(self, maxsize: int = 0) -> None:
        self.maxsize = maxsize
        self.closed = False
        self.held_back = False
        self._queues: dict[str, Queue[T]] = {}
        # The idle keys, least recently used first.
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._entries: dict[OpId, Entry[T]] = {}
        # Insertion-ordered sets, so that the effects of a death do not depend on hashes.
        self._owned: dict[OwnerId, dict[OpId, None]] = {}

    # Commands of producers

    def announce(self, op_id: OpId, *, key: str = DEFAULT_KEY, producer: OwnerId = None) -> None:
        """Announce a put that is in transit, so that it is reported as lost if its producer dies before it arrives."""
        self._enter(op_id, producer, Announced(key, producer))

    def put(
        self,
        op_id: OpId,
        payload: T,
        *,
        weight: float = 0,
        key: str = DEFAULT_KEY,
        size: int = 0,
        producer: OwnerId = None,
        now: float = 0.0,
        wait: bool = True,
    ) -> list[Effect[T]]:
        """Put an item: `Accepted` now or later when there is room, or `Refused`. It may have been announced before."""
        if isinstance(announced := self._entries.get(op_id), Announced):
            self._leave(op_id, announced.producer)
        if self.closed:
            return [Refused(op_id, Reason.CLOSED, payload)]
        queue = self._queue(key)
        self._idle.pop(key, None)
        item = QueuedItem(payload, weight, size, producer, -1)
        effects: list[Effect[T]] = []
        if self._has_room(queue):
            self._accept(queue, op_id, item, effects)
            if queue.gets:
                self._serve(queue, now, effects)
        elif wait:
            put = Put(queue, item, now)
            self._enter(op_id, producer, put)
            queue.blocked[op_id] = put
        else:
            effects.append(Refused(op_id, Reason.FULL, payload))
        return effects

    # Commands of consumers

    def get(
        self,
        op_id: OpId,
        need: float | None = None,
        *,
        key: str = DEFAULT_KEY,
        consumer: OwnerId = None,
        now: float = 0.0,
        wait: bool = True,
    ) -> list[Effect[T]]:
        """Ask for one item, or for items until their weights reach or exceed `need`: `Delivered`, now or later.

        Once the channel is closed, the remaining items are delivered even below that weight. Without `wait`, a get
        that cannot be delivered now is `Refused`.
        """
        queue = self._queue(key)
        get: Get[T] = Get(queue, consumer, need, now, [])
        self._enter(op_id, consumer, get)
        queue.gets[op_id] = get
        effects: list[Effect[T]] = []
        self._settle(queue, now, effects)
        if not wait and self._entries.get(op_id) is get:
            why = get.shortfall()
            returned = self._withdraw(op_id, get, now)
            effects.append(Refused(op_id, Reason.EMPTY, None, why))
            self._give_back(queue, returned, now, effects)
        return effects

    def taken(self, op_id: OpId, now: float = 0.0) -> list[Effect[T]]:
        """Acknowledge the delivery of a get as soon as the consumer has it: on a closed channel other gets wait for it.

        An unknown operation is ignored: it was cancelled before.
        """
        delivery = self._entries.get(op_id)
        if not isinstance(delivery, Delivery):
            return []
        self._leave(op_id, delivery.consumer)
        queue = delivery.queue
        queue.delivering -= 1
        effects: list[Effect[T]] = [Acknowledged(op_id, delivery.items)]
        self._settle(queue, now, effects)
        return effects

    # Ends of waiting

    def cancel(self, op_id: OpId, now: float = 0.0) -> list[Effect[T]]:
        """End a waiting put or get, or take back a delivery that its consumer will not use.

        Reserved or delivered items go back to their place. An accepted put stays accepted, and an unknown op_id is
        ignored: the operation has ended already.
        """
        entry = self._entries.get(op_id)
        if entry is None:
            return []
        effects: list[Effect[T]] = []
        if isinstance(entry, Announced):
            self._leave(op_id, entry.producer)
            effects.append(Refused(op_id, Reason.CANCELLED))
        elif isinstance(entry, Put):
            self._unblock(op_id, entry, now)
            effects.append(Refused(op_id, Reason.CANCELLED, entry.item.payload))
            self._settle(entry.queue, now, effects)
        else:
            why = entry.shortfall() if isinstance(entry, Get) else ""
            returned = self._withdraw(op_id, entry, now)
            effects.append(Refused(op_id, Reason.CANCELLED, None, why))
            self._give_back(entry.queue, returned, now, effects)
        return effects

    def remove(self, owner: OwnerId, now: float = 0.0) -> list[Effect[T]]:
        """Remove a dead producer or consumer with its unfinished operations.

        Its puts that were not accepted are `Lost`; items reserved by it or delivered to it go back to their place;
        its accepted items stay.
        """
        effects: list[Effect[T]] = []
        # Withdraw all of its gets first, so that the items of one are not handed to another.
        touched: dict[str, tuple[Queue[T], list[QueuedItem[T]]]] = {}
        for op_id in list(self._owned.get(owner, ())):
            entry = self._entries[op_id]
            if isinstance(entry, Announced):
                self._leave(op_id, owner)
                effects.append(Lost(op_id, entry.key, owner, None))
                continue
            returned = touched.setdefault(entry.queue.key, (entry.queue, []))[1]
            if isinstance(entry, Put):
                self._unblock(op_id, entry, now)
                effects.append(Lost(op_id, entry.queue.key, owner, entry.item.payload))
            else:
                returned.extend(self._withdraw(op_id, entry, now))
        for queue, returned in touched.values():
            self._give_back(queue, returned, now, effects)
        return effects

    def hold_back(self, on: bool, now: float = 0.0) -> list[Effect[T]]:
        """Block all puts except those whose item a get waits for, even if there is room; or unblock them."""
        self.held_back = on
        effects: list[Effect[T]] = []
        if not on:
            for queue in list(self._queues.values()):
                if queue.blocked:
                    self._settle(queue, now, effects)
        return effects

    def close(self, now: float = 0.0) -> list[Effect[T]]:
        """Close the channel: refuse waiting puts; queued items can still be got.

        Waiting batches get the items that they have reserved. Idempotent.
        """
        effects: list[Effect[T]] = []
        if self.closed:
            return effects
        self.closed = True
        for queue in list(self._queues.values()):
            for op_id, put in list(queue.blocked.items()):
                self._unblock(op_id, put, now)
                effects.append(Refused(op_id, Reason.CLOSED, put.item.payload))
            self._settle(queue, now, effects)
        return effects

    # Questions

    def depth(self, key: str = DEFAULT_KEY) -> int:
        queue = self._queues.get(key)
        return len(queue.items) if queue else 0

    def full(self, key: str = DEFAULT_KEY) -> bool:
        return not self._has_room(self._queues.get(key) or Queue(key))

    def peek_all(self, key: str = DEFAULT_KEY) -> list[QueuedItem[T]]:
        queue = self._queues.get(key)
        return list(queue.items) if queue else []

    @property
    def drained(self) -> bool:
        """Whether the channel is closed and no item is left or can come back."""
        return self.closed and len(self._idle) == len(self._queues)

    def waiting(self, op_id: OpId) -> str | None:
        """Return the shortfall of the get `op_id`, as text (empty for a single item); None if it does not wait."""
        entry = self._entries.get(op_id)
        return entry.shortfall() if isinstance(entry, Get) else None

    def waiting_gets(self) -> list[OpId]:
        return [op_id for queue in self._queues.values() for op_id in queue.gets]

    def statistics(self) -> dict[str, KeyStatistics]:
        """Return the statistics of each remembered key."""
        return {key: queue.statistics() for key, queue in self._queues.items()}

    # Inside

    def _queue(self, key: str) -> Queue[T]:
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = Queue(key)
        return queue

    def _has_room(self, queue: Queue[T]) -> bool:
        room = not self.maxsize or len(queue.items) < self.maxsize
        return room and (not self.held_back or bool(queue.gets and not queue.items))

    def _enter(self, op_id: OpId, owner: OwnerId, entry: Entry[T]) -> None:
        if op_id in self._entries:
            raise ValueError(f"the op_id {op_id!r} is in use")
        self._entries[op_id] = entry
        owned = self._owned.get(owner)
        if owned is None:
            owned = self._owned[owner] = {}
        owned[op_id] = None

    def _leave(self, op_id: OpId, owner: OwnerId) -> None:
        del self._entries[op_id]
        owned = self._owned[owner]
        del owned[op_id]
        if not owned:
            del self._owned[owner]

    def _accept(self, queue: Queue[T], op_id: OpId, item: QueuedItem[T], effects: list[Effect[T]]) -> None:
        item.sequence = queue.sequence
        queue.sequence += 1
        queue.items.append(item)
        queue.bytes += item.size
        effects.append(Accepted(op_id))

    def _settle(self, queue: Queue[T], now: float, effects: list[Effect[T]]) -> None:
        """Make all possible progress: serve gets, accept puts, refuse operations that can no longer succeed."""
        self._serve(queue, now, effects)
        if self.closed:
            while queue.gets:
                op_id, get = next(iter(queue.gets.items()))
                if get.reserved:
                    self._deliver(op_id, get, now, effects)
                elif queue.delivering:
                    break
                else:
                    self._withdraw(op_id, get, now)
                    effects.append(Refused(op_id, Reason.CLOSED))
        self._remember(queue)

    def _serve(self, queue: Queue[T], now: float, effects: list[Effect[T]]) -> None:
        items, gets, blocked = queue.items, queue.gets, queue.blocked
        while True:
            while blocked and self._has_room(queue):
                op_id, put = next(iter(blocked.items()))
                self._unblock(op_id, put, now)
                self._accept(queue, op_id, put.item, effects)
            if not gets or not items:
                return
            op_id, get = next(iter(gets.items()))
            while items and not get.satisfied:
                item = items.popleft()
                get.reserved.append(item)
                get.weight += item.weight
            if get.satisfied:
                self._deliver(op_id, get, now, effects)

    def _deliver(self, op_id: OpId, get: Get[T], now: float, effects: list[Effect[T]]) -> None:
        queue = get.queue
        del queue.gets[op_id]
        queue.delivered += len(get.reserved)
        queue.get_wait += now - get.since
        queue.delivering += 1
        self._entries[op_id] = Delivery(queue, get.consumer, get.reserved)
        effects.append(Delivered(op_id, get.reserved))

    def _unblock(self, op_id: OpId, put: Put[T], now: float) -> None:
        del put.queue.blocked[op_id]
        put.queue.put_wait += now - put.since
        self._leave(op_id, put.item.producer)

    def _withdraw(self, op_id: OpId, entry: Get[T] | Delivery[T], now: float) -> list[QueuedItem[T]]:
        """End a get or take back a delivery; return the items that it held."""
        queue = entry.queue
        self._leave(op_id, entry.consumer)
        if isinstance(entry, Get):
            del queue.gets[op_id]
            queue.get_wait += now - entry.since
            return entry.reserved
        queue.delivering -= 1
        queue.delivered -= len(entry.items)
        return entry.items

    def _give_back(self, queue: Queue[T], returned: list[QueuedItem[T]], now: float, effects: list[Effect[T]]) -> None:
        """Return items to their places at the head, for the next consumers."""
        if returned:
            back = list(returned)
            if queue.gets:
                # The get at the head may have reserved later items than those that come back: it must reserve again.
                head = next(iter(queue.gets.values()))
                back += head.reserved
                head.reserved, head.weight = [], 0
            last = max(item.sequence for item in back)
            while queue.items and queue.items[0].sequence < last:
                back.append(queue.items.popleft())
            back.sort(key=lambda item: item.sequence, reverse=True)
            queue.items.extendleft(back)
        self._settle(queue, now, effects)

    def _remember(self, queue: Queue[T]) -> None:
        """Record whether a queue is idle; forget the least recently used idle queue beyond the limit."""
        if not queue.idle:
            self._idle.pop(queue.key, None)
            return
        self._idle[queue.key] = None
        self._idle.move_to_end(queue.key)
        if len(self._idle) > _REMEMBERED_KEYS:
            key, _ = self._idle.popitem(last=False)
            del self._queues[key]
