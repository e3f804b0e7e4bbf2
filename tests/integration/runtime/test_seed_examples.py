"""The examples of the programming interface, as they are written but for the import line, `import os`, the device and,
where four ranks are meant, the placement."""

from __future__ import annotations

import asyncio
import os

import torch

from rlinf_core import Cluster, NodePlacementStrategy, Worker

SEND_GROUP_NAME = "send_worker_group"
RECV_GROUP_NAME = "recv_worker_group"


class MyWorker(Worker):
    def __init__(self):
        super().__init__()

    def initialize(self):
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(backend="gloo")

        test_tensor = torch.ones(size=(1, 1), dtype=torch.float32, device="cpu")
        torch.distributed.all_reduce(test_tensor)
        return test_tensor

    def hello(self):
        return self._rank


class TimedWorker(Worker):
    @Worker.timer("run_training")
    def run_training(self, batch):
        return self.train_step(batch)

    @Worker.timer("train_step")
    def train_step(self, batch):
        with self.worker_timer("inside"):
            return int(os.environ["RANK"]) + batch


class SendWorker(Worker):
    def __init__(self):
        super().__init__()

    def hello_recv(self):
        # 1. Send a message to the worker of the same rank, 2. receive its reply.
        msg = f"Hello from SendWorker Rank {self._rank}!"
        self.send(msg, dst_group_name=RECV_GROUP_NAME, dst_rank=self._rank)
        reply = self.recv(src_group_name=RECV_GROUP_NAME, src_rank=self._rank)

        # 3. A tensor, a list and a dict of tensors, to the next rank.
        dst_rank = (self._rank + 1) % self._world_size
        tensor = torch.ones(size=(1, 1), dtype=torch.float32, device="cpu")
        self.send(tensor, dst_group_name=RECV_GROUP_NAME, dst_rank=dst_rank)
        tensor_list = [torch.tensor(1.0, dtype=torch.float32, device="cpu") for _ in range(4)]
        self.send(tensor_list, dst_group_name=RECV_GROUP_NAME, dst_rank=dst_rank)
        tensor_dict = {
            "tensor1": torch.tensor(2.0, dtype=torch.float32, device="cpu"),
            "tensor2": torch.tensor(3.0, dtype=torch.float32, device="cpu"),
        }
        self.send(tensor_dict, dst_group_name=RECV_GROUP_NAME, dst_rank=dst_rank)

        # 4. A tensor without metadata.
        tensor = torch.ones(size=(2, 1), dtype=torch.float32, device="cpu")
        self.send_tensor(tensor, dst_group_name=RECV_GROUP_NAME, dst_rank=dst_rank)
        return reply

    def hello_recv_async(self):
        # 1. Asynchronously, waited for at once.
        dst_rank = (self._rank + 1) % self._world_size
        tensor = torch.ones(size=(3, 1), dtype=torch.float32, device="cpu")
        async_send_work = self.send(tensor, dst_group_name=RECV_GROUP_NAME, dst_rank=dst_rank, async_op=True)
        async_send_work.wait()

        # 2. Asynchronously, waited for by asyncio.
        async def send_tensor_async():
            dst_rank = (self._rank + 1) % self._world_size
            tensor = torch.ones(size=(4, 1), dtype=torch.float32, device="cpu")
            async_send_work = self.send(tensor, dst_group_name=RECV_GROUP_NAME, dst_rank=dst_rank, async_op=True)
            await async_send_work.async_wait()

        asyncio.run(send_tensor_async())


class RecvWorker(Worker):
    def __init__(self):
        super().__init__()

    def hello_recv(self):
        msg = self.recv(src_group_name=SEND_GROUP_NAME, src_rank=self._rank)
        reply = f"Hello from RecvWorker Rank {self._rank}!"
        self.send(reply, dst_group_name=SEND_GROUP_NAME, dst_rank=self._rank)

        src_rank = (self._rank - 1) % self._world_size
        tensor = self.recv(src_group_name=SEND_GROUP_NAME, src_rank=src_rank)
        tensor_list = self.recv(src_group_name=SEND_GROUP_NAME, src_rank=src_rank)
        tensor_dict = self.recv(src_group_name=SEND_GROUP_NAME, src_rank=src_rank)

        buffer = torch.empty(size=(2, 1), dtype=torch.float32, device="cpu")
        self.recv_tensor(buffer, src_group_name=SEND_GROUP_NAME, src_rank=src_rank)
        return msg, tensor, tensor_list, tensor_dict, buffer

    def hello_recv_async(self):
        src_rank = (self._rank - 1) % self._world_size
        async_recv_work = self.recv(src_group_name=SEND_GROUP_NAME, src_rank=src_rank, async_op=True)
        first = async_recv_work.wait()

        async def recv_tensor_async():
            src_rank = (self._rank - 1) % self._world_size
            async_recv_work = self.recv(src_group_name=SEND_GROUP_NAME, src_rank=src_rank, async_op=True)
            return await async_recv_work.async_wait()

        return first, asyncio.run(recv_tensor_async())


def test_a_group_with_a_process_group_of_torch(cluster: Cluster) -> None:
    my_worker_group = MyWorker.create_group().launch(
        cluster=cluster, name="my_worker_group", placement_strategy=NodePlacementStrategy([0] * 4)
    )
    with my_worker_group:
        assert my_worker_group.initialize().wait()[0] == torch.tensor([[4.0]])
        assert my_worker_group.execute_on(0, 3).hello().wait() == [0, 3]


def test_timers(cluster: Cluster) -> None:
    worker_group = TimedWorker.create_group().launch(cluster, NodePlacementStrategy([0] * 2), name="timed_group")
    with worker_group:
        handle = worker_group.run_training(1)
        assert handle.wait() == [1, 2]
        timing = handle.consume_durations()
        assert set(timing) == {"run_training", "train_step", "inside"}
        assert timing["inside"] <= timing["train_step"] <= timing["run_training"]


def test_two_groups_that_talk(cluster: Cluster) -> None:
    placement = NodePlacementStrategy([0] * 4)
    send_group = SendWorker.create_group().launch(cluster=cluster, name=SEND_GROUP_NAME, placement_strategy=placement)
    recv_group = RecvWorker.create_group().launch(cluster=cluster, name=RECV_GROUP_NAME, placement_strategy=placement)
    with send_group, recv_group:
        sent = send_group.hello_recv()
        received = recv_group.hello_recv().wait()
        assert sent.wait() == [f"Hello from RecvWorker Rank {rank}!" for rank in range(4)]
        for rank, (msg, tensor, tensor_list, tensor_dict, buffer) in enumerate(received):
            assert msg == f"Hello from SendWorker Rank {rank}!"
            assert torch.equal(tensor, torch.ones(1, 1))
            assert isinstance(tensor_list, list)
            assert [float(each) for each in tensor_list] == [1.0] * 4
            assert {name: float(each) for name, each in tensor_dict.items()} == {"tensor1": 2.0, "tensor2": 3.0}
            assert torch.equal(buffer, torch.ones(2, 1))

        sent = send_group.hello_recv_async()
        received = recv_group.hello_recv_async().wait()
        sent.wait()
        assert [[tuple(each.shape) for each in pair] for pair in received] == [[(3, 1), (4, 1)]] * 4
