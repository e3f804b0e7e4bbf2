"""The programs and snippets that describe workers and channels, typed as they stand there.

Theirs differ from what runs here in the import line, in `import os`, and, as no accelerator is needed here, in the
device and the number of processes.
"""

from __future__ import annotations

import doctest
import os
from pathlib import Path
from typing import Any

import pytest

from rlinf_core import Channel, Cluster, NodePlacementStrategy, Worker, WorkerAddress, WorkerInfo

pytestmark = pytest.mark.timeout(600)

SEEDS = Path(__file__).with_name("seeds")
# What is written in them, and what is run.
CHANGES = {
    "from rlinf.scheduler import": "from rlinf_core import",
    'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))': "pass",
    "torch.cuda.current_device()": '"cpu"',
    ", device='cuda:0'": "",
    'backend="nccl"': 'backend="gloo"',
    ".launch(cluster=cluster, ": ".launch(cluster=cluster, placement_strategy=processes, ",
}
TIMED_BLOCK = """
class MyWorker(Worker):
    def run_training(self, batch):
        with self.worker_timer("run_training"):
            return self.train_step(batch)

    def train_step(self, batch): ...
"""
TIMED_METHODS = """
class MyWorker(Worker):
    @Worker.timer("run_training")
    def run_training(self, batch):
        return self.train_step(batch)

    @Worker.timer("train_step")
    def train_step(self, batch): ...
"""
DURATIONS = """
handle = worker_group.run_training(...)
result = handle.wait()
timing = handle.consume_durations()  # dict of tag -> duration
"""
# What is pickled by value: no worker imports it.
MAIN = {"__name__": "__main__"}


@pytest.mark.parametrize(("program", "processes"), [("process_group", 4), ("send_and_receive", 2)])
def test_programs(cluster: Cluster, program: str, processes: int) -> None:
    text = (SEEDS / f"{program}.txt").read_text()
    for written, run in CHANGES.items():
        text = text.replace(written, run)
    names: dict[str, Any] = {**MAIN, "os": os, "processes": NodePlacementStrategy([0] * processes)}
    examples = doctest.DocTestParser().get_examples(text)
    assert len(examples) > 5
    try:
        # Not doctest's own way, which takes what workers print for the value.
        for example in examples:
            if example.want:
                assert f"{eval(example.source, names)!r}\n" == example.want
            else:
                exec(example.source, names)  # noqa: S102
    finally:
        for group in ("my_worker_group", "send_group", "recv_group"):
            if group in names:
                names[group].shutdown()


@pytest.mark.parametrize(
    ("snippet", "tags"), [(TIMED_BLOCK, {"run_training"}), (TIMED_METHODS, {"run_training", "train_step"})]
)
def test_timers(cluster: Cluster, snippet: str, tags: set[str]) -> None:
    names: dict[str, Any] = {**MAIN, "Worker": Worker}
    exec(snippet, names)  # noqa: S102
    placement = NodePlacementStrategy([0])
    with names["MyWorker"].create_group().launch(cluster, placement) as names["worker_group"]:
        exec(DURATIONS, names)  # noqa: S102
        assert names["result"] == [None]
        assert set(names["timing"]) == tags


class MyWorker(Worker):
    """Does what is told of workers and channels in running text."""

    def known_variables(self) -> dict[str, str]:
        return {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")}

    def info(self) -> tuple[WorkerAddress, WorkerInfo]:
        return self.worker_address, self.worker_info

    def family(self, cluster_nodes: int) -> tuple[list[str], list[str]]:
        with (
            Cluster(cluster_nodes) as cluster,
            MyWorker.create_group().launch(cluster, NodePlacementStrategy([0])) as children,
        ):
            (address, _info), *_ = children.info().wait()
        own = self.worker_address
        assert address == own.get_child_address(0)
        assert (address.get_parent_rank(), address.get_parent_address()) == (self._rank, own)
        return [own.get_name()], [address.get_name()]

    def produce(self, channel_name: str) -> str:
        channel = self.create_channel(
            channel_name,
            node_id=0,
            maxsize=0
        )  # fmt: skip
        for item in range(1, 7):
            channel.put(item, weight=0, key="default", async_op=False)
            channel.put(item, weight=item, key="weighted", async_op=False)
        return str(channel)

    def consume(self, channel_name: str) -> tuple[Any, Any, Any]:
        channel = self.connect_channel(channel_name)
        batch_weight = 5
        first = channel.get(key="default", async_op=False)
        second = channel.get(key="default", async_op=True).wait()
        return first, second, channel.get_batch(batch_weight, key="weighted", async_op=False)

    def send_to_next(self, tensor: Any) -> Any:
        group, size = "Worker_group_MyWorker", self._world_size
        dst_rank, src_rank = (self._rank + 1) % size, (self._rank - 1) % size
        work = self.send_tensor(tensor, group, dst_rank, async_op=True)
        buffer = tensor.new_empty(tensor.shape)
        self.recv_tensor(buffer, group, src_rank, async_op=False)
        assert work is not None
        work.wait()
        return buffer


def test_what_is_told_in_words(cluster: Cluster) -> None:
    placement = NodePlacementStrategy([0, 0])
    with MyWorker.create_group().launch(cluster, placement) as group:
        output = group.known_variables().wait()
        assert [message["RANK"] for message in output] == ["0", "1"]
        assert {message["WORLD_SIZE"] for message in output} == {"2"}
        assert len({(message["MASTER_ADDR"], message["MASTER_PORT"]) for message in output}) == 1

        (_, info), (address, _) = group.info().wait()
        assert address.get_name() == "Worker_group_MyWorker:1"
        assert info.address == address.get_parent_address().get_child_address(0)
        assert (info.rank, info.node_id, info.gpu_id, info.available_gpus) == (0, 0, None, ())
        assert info.node_ip == cluster.get_node_ip(0)
        assert group.execute_on(1).family(1).wait() == [(["Worker_group_MyWorker:1"], ["Worker_group_MyWorker:1:0"])]

        assert "rollout_queue" in group.execute_on(0).produce("rollout_queue").wait()[0]
        assert group.execute_on(1).consume("rollout_queue").wait() == [(1, 2, [1, 2, 3])]


class Generator(Worker):
    """Puts whole trajectories into the queue as they are finished: the longer, the later."""

    def generate(self, lengths: list[int]) -> None:
        rollout_output_queue = self.connect_channel("rollout_output_queue")
        for length in lengths:
            rollout_output_queue.put([self._rank] * length, weight=length)


def test_load_balancing(cluster: Cluster) -> None:
    groups, lengths = 2, [1, 2, 4, 8, 16, 32]
    rollout_output_queue = Channel.create("rollout_output_queue")
    with Generator.create_group().launch(cluster, NodePlacementStrategy([0, 0])) as generators:
        generated = generators.generate(lengths)
        trained: list[list[int]] = [[] for _ in range(groups)]
        for number in range(2 * len(lengths)):
            trained[number % groups].append(len(rollout_output_queue.get()))
        generated.wait()
    assert sorted(trained[0] + trained[1]) == sorted(lengths * 2)
    assert [len(item) for item in trained] == [len(lengths)] * groups
