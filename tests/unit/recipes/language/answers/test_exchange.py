"""Batches that actors have evaluated by another group, over queues in the place of the network."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import pytest
import torch
from torch import Tensor

from recipes.language.workers.token_evaluation import EvaluationClient, EvaluationServer, shares
from tests.unit.recipes.language.tiny import random_batch

Wires = defaultdict[tuple[str, int, str, int], deque[Any]]


class Peer:
    """Stands for a worker."""

    def __init__(self, group: str, rank: int, wires: Wires) -> None:
        self.group, self.rank, self.wires = group, rank, wires

    def send(self, value: Any, group: str, rank: int) -> None:
        self.wires[self.group, self.rank, group, rank].append(value)

    def recv(self, group: str, rank: int) -> Any:
        return self.wires[group, rank, self.group, self.rank].popleft()


def evaluated(tokens: Tensor) -> Tensor:
    return tokens.float() * 2 + 1


@pytest.mark.parametrize(("actors", "others"), [(1, 1), (3, 1), (1, 3), (2, 3)])
def test_every_token_gets_its_own_value_back(actors: int, others: int) -> None:
    wires: Wires = defaultdict(deque)
    peers: Any = [Peer("actor", rank, wires) for rank in range(actors)]
    servers: Any = [Peer("critic", rank, wires) for rank in range(others)]
    clients = [EvaluationClient(peer, "critic", others) for peer in peers]
    batches = [random_batch(rank, groups=2 + 3 * rank) for rank in range(actors)]
    for client, batch in zip(clients, batches, strict=True):
        client.send(batch)
        client.send_tokens(batch.logprobs * 3)
    for item in servers:
        server = EvaluationServer(item, "actor", actors)
        mine = server.recv()
        assert torch.equal(server.recv_tokens(), mine.logprobs * 3)
        server.send_tokens(evaluated(mine.logprobs))
    for client, batch in zip(clients, batches, strict=True):
        assert torch.equal(client.recv_tokens(), evaluated(batch.logprobs))
    assert not any(wires.values())


def test_groups_stay_whole_and_workers_get_like_shares() -> None:
    batch = random_batch(5, groups=40)
    dealt = shares(batch, 4)
    assert sorted(row for part in dealt for row in part) == list(range(len(batch)))
    groups = [set(batch.groups[torch.tensor(part)].tolist()) for part in dealt]
    assert sum(map(len, groups)) == 40
    tokens = [int(batch.lengths[torch.tensor(part)].sum()) for part in dealt]
    assert max(tokens) < 1.1 * min(tokens)
