"""A channel in a simulated world: the real broker, and producers and consumers that wait, give up, die and come back.

Judged is what every user relies on: what was accepted reaches one consumer, once, in order; what was refused reaches
nobody; every operation of a living process ends; and in the end nothing is left in the broker.
"""

from __future__ import annotations

import itertools
import struct
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from rlinf_core.channel import wire
from rlinf_core.channel.broker import Broker
from rlinf_core.channel.broker_clients import MemoryGate
from rlinf_core.channel.queue_state import Reason
from rlinf_core.channel.wire import ReplyKind, RequestKind
from rlinf_core.collective.frame import Frame, FrameKind
from tests.unit.simulation.endpoint import ServiceEndpoint
from tests.unit.simulation.world import World

_KEYS = ("default", "a")
_ITEM = struct.Struct("<III")
_ENDS = 60.0


@dataclass
class Ledger:
    """What became of each item: its producer, the life of it, and its number there."""

    accepted: set[bytes] = field(default_factory=set[bytes])
    refused: set[bytes] = field(default_factory=set[bytes])
    sent: Counter[bytes] = field(default_factory=Counter[bytes])
    got: dict[bytes, list[Client]] = field(default_factory=lambda: defaultdict(list))
    order: dict[tuple[str, int, int], list[int]] = field(default_factory=lambda: defaultdict(list))


class Client:
    """One life of a process that uses the channel."""

    def __init__(self, run: ChannelRun, name: str, life: int) -> None:
        self.run, self.name, self.life = run, name, life
        self.alive = True
        # Keys of which the channel said that nothing will come any more.
        self.ended: set[str] = set()
        # Operations that wait, by op_id: the item of a put, or None for a get.
        self.open: dict[int, tuple[bytes | None, str]] = {}
        self.withdrawn: dict[int, tuple[bytes | None, str]] = {}
        self._ids = itertools.count(1)
        self._peer = run.endpoint.connect(name, f"{name}/{life}", self._receive)

    def ask(self, kind: int, op_id: int, key: str, *, head: bytes = b"", weight: float = 0, wait: bool = True) -> None:
        packed = wire.pack_request(kind, op_id, key.encode(), wait)
        frame = Frame(FrameKind.MESSAGE, tag=wire.REQUESTS, route=1, key=packed, head=head, weight=weight)
        self._peer.there.send(frame)

    def put(self) -> None:
        if not self.alive:
            return
        world = self.run.world
        key = world.random.choice(_KEYS)
        count = world.random.choice((1, 1, 1, 3))
        puts: list[tuple[int, float, bytes]] = []
        for _ in range(count):
            op_id = next(self._ids)
            item = _ITEM.pack(int(self.name[2:]), self.life, op_id)
            self.open[op_id] = (item, key)
            puts.append((op_id, 1.0, item))
            if world.chance(0.2):
                world.after(world.random.random() * 4, self._withdraw, op_id)
        world.note(self.name, self.life, "puts", [op_id for op_id, _, _ in puts], key)
        if count > 1:
            self.ask(RequestKind.PUT_MANY, 0, key, head=wire.pack(puts))
            return
        op_id, weight, item = puts[0]
        if world.chance(0.3):
            self.ask(RequestKind.ANNOUNCE, op_id, key)
        self.ask(RequestKind.PUT, op_id, key, head=item, weight=weight, wait=world.chance(0.8))

    def get(self, key: str, *, patient: bool = False) -> None:
        if not self.alive:
            return
        world, op_id = self.run.world, next(self._ids)
        self.open[op_id] = (None, key)
        batch = world.chance(0.4)
        wait = patient or world.chance(0.8)
        self.ask(RequestKind.GET, op_id, key, weight=world.random.randint(1, 4) if batch else 0, wait=wait)
        world.note(self.name, self.life, "gets", op_id, key, batch, wait)
        if not patient and world.chance(0.3):
            world.after(world.random.random() * 4, self._withdraw, op_id)

    def die(self) -> None:
        self.alive = False
        self._peer.die()
        self.run.world.note(self.name, self.life, "dies")

    def _withdraw(self, op_id: int) -> None:
        if self.alive and op_id in self.open:
            self.withdrawn[op_id] = self.open.pop(op_id)
            self.ask(RequestKind.CANCEL, op_id, self.withdrawn[op_id][1])

    def _receive(self, message: tuple[bytes, bytes]) -> None:
        if not self.alive:
            return
        key, head = message
        reply = wire.unpack_reply(key)
        op_id = reply.op_id
        ledger = self.run.ledger
        if reply.say == ReplyKind.ACCEPTED:
            for accepted in wire.unpack(head) if head else (op_id,):
                item, _ = self._take(accepted)
                if item is not None:
                    ledger.accepted.add(item)
        elif reply.say in (ReplyKind.ITEM, ReplyKind.ITEMS):
            items = [head] if reply.say == ReplyKind.ITEM else wire.unpack(head)
            ledger.sent.update(items)
            if op_id in self.open:
                self._got(op_id, self.open.pop(op_id)[1], items)
        elif reply.say == ReplyKind.REFUSED:
            item, queue = self._take(op_id)
            reason = wire.REASONS[reply.place]
            self.run.world.note(self.name, self.life, "refused", op_id, reason)
            if item is not None:
                ledger.refused.add(item)
            elif queue and reason is Reason.CLOSED:
                self.ended.add(queue)
        elif reply.say == ReplyKind.FAILED:
            self._take(op_id)

    def _take(self, op_id: int) -> tuple[bytes | None, str]:
        taken = self.open.pop(op_id, None) or self.withdrawn.pop(op_id, None)
        return taken or (None, "")

    def _got(self, op_id: int, key: str, items: list[bytes]) -> None:
        world, ledger = self.run.world, self.run.ledger
        world.check(items, "an empty delivery")
        for item in items:
            producer, life, number = _ITEM.unpack(item)
            world.note(self.name, self.life, "got", producer, life, number)
            ledger.got[item].append(self)
            ledger.order[key, producer, life].append(number)
        world.soon(self._sign, op_id, key, within=0.05)

    def _sign(self, op_id: int, key: str) -> None:
        if self.alive:
            self.ask(RequestKind.TAKEN, op_id, key)


class ChannelRun:
    """A channel from its first client to its end."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ledger = Ledger()
        self.endpoint = ServiceEndpoint(world, "c:0")
        free = 1 << 40
        self.gate = MemoryGate(lambda: free, reserve=1)
        endpoint: Any = self.endpoint
        self.broker = Broker("c", endpoint, world.random.choice((0, 0, 1, 3)), gate=self.gate)
        self.clients: dict[str, Client] = {}
        self._lives: Counter[str] = Counter()

    def start(self, name: str) -> Client:
        self._lives[name] += 1
        client = self.clients[name] = Client(self, name, self._lives[name])
        client.ask(RequestKind.HELLO, 0, "")
        self.world.note(name, self._lives[name], "starts")
        return client

    def play(self) -> None:
        world = self.world
        producers = [f"p:{rank}" for rank in range(world.random.randint(1, 3))]
        consumers = [f"k:{rank}" for rank in range(world.random.randint(1, 3))]
        for name in (*producers, *consumers):
            self.start(name)
        for name in producers:
            for _ in range(world.random.randint(2, 12)):
                world.after(world.random.random() * 5, lambda who: self.clients[who].put(), name)
        for name in consumers:
            for _ in range(world.random.randint(2, 12)):
                key = world.random.choice(_KEYS)
                world.after(world.random.random() * 5, lambda who, key: self.clients[who].get(key), name, key)
        for name in world.random.sample([*producers, *consumers], world.random.randint(0, 2)):
            world.after(world.random.random() * 6, self._kill, name)
        world.run(20.0)
        self._finish()

    def _kill(self, name: str) -> None:
        self.clients[name].die()
        self.world.after(0.05 + self.world.random.random() * 2, self.start, name)

    def _finish(self) -> None:
        """Close the channel, and take what is left."""
        world = self.world
        last = self.start("d:0")
        last.ask(RequestKind.CLOSE, 1 << 20, "")
        world.run(world.now + 10.0)
        for key in _KEYS:
            until = world.now + _ENDS
            while key not in last.ended:
                while len(last.open) < 2:
                    last.get(key, patient=True)
                world.check(world.now < until, "a get on a closed channel does not end")
                world.run(world.now + 0.02)
        world.run(world.now + 10.0)
        self._judge()

    def _judge(self) -> None:
        check, ledger = self.world.check, self.ledger
        for client in self.clients.values():
            check(not client.open and not client.withdrawn, client.name, "still waits:", client.open, client.withdrawn)
        for item in ledger.accepted:
            check(item in ledger.got, "lost although accepted:", _ITEM.unpack(item))
        for item, takers in ledger.got.items():
            check(item not in ledger.refused, "refused, and delivered:", _ITEM.unpack(item))
            check(sum(taker.alive for taker in takers) <= 1, "delivered twice:", _ITEM.unpack(item))
        for (key, producer, life), numbers in ledger.order.items():
            # What came back is delivered again later.
            once = [number for number in numbers if ledger.sent[_ITEM.pack(producer, life, number)] == 1]
            check(len(self.clients) > 3 or once == sorted(once), "out of order:", key, producer, life, numbers)
        check(self.broker.announce_end(), "a closed channel that was emptied does not end")
        check(self.gate.held == 0, "bytes are held that nobody has:", self.gate.held)
        for key, figures in self.broker._queue.statistics().items():
            check(figures.puts == figures.gets, "puts and gets of", key, "differ:", figures)
