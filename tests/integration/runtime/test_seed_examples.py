"""Programs and snippets that describe workers, channels and the training flow, typed as they stand there.

Theirs differ from what runs here in the import line, in `import os`, and, as no accelerator is needed here, in the
device and the number of processes.
"""

from __future__ import annotations

import doctest
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlinf_core import (
    Channel,
    Cluster,
    HybridComponentPlacement,
    NodePlacementStrategy,
    Worker,
    WorkerAddress,
    WorkerInfo,
    load_job,
)
from tests.rlinf_command import REACH

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


@pytest.fixture
def cfg(tmp_path: Path) -> Any:
    job = load_job(
        "embodied/pick-laptop",
        (
            *REACH,
            *("actor.group_name=TheActors", "runner.val_check_interval=-1", "runner.max_steps=2"),
            f"runner.logger.log_path={tmp_path / 'runs'}",
        ),
        environ={},
    )
    job.raise_if_bad()
    return job.config


ENTRY = (SEEDS / "training_flow.txt").read_text()
LOOP = (SEEDS / "training_loop.txt").read_text()
GROUPS = ("actor_group", "rollout_group", "env_group")


class Handles:
    """A group that keeps the handles of its calls, which the loop drops."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.handles: dict[str, list[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            handle = getattr(self.group, name)(*args)
            self.handles.setdefault(name, []).append(handle)
            return handle

        return call


def names_of(cfg: Any) -> dict[str, Any]:
    """Return what the programs find there before their first line."""
    # Not at the head of this module, which workers import.
    from recipes.embodied.loop.embodied_runner import EmbodiedRunner
    from recipes.embodied.workers.actor_worker import EmbodiedFSDPActor
    from recipes.embodied.workers.env_worker import EnvWorker
    from recipes.embodied.workers.rollout_worker import MultiStepRolloutWorker

    classes = (Cluster, HybridComponentPlacement, EmbodiedFSDPActor, MultiStepRolloutWorker, EnvWorker, EmbodiedRunner)
    return {"cfg": cfg, "num_nodes": 1, **{item.__name__: item for item in classes}}


def run(text: str, names: dict[str, Any]) -> None:
    exec(text, names)  # noqa: S102


@pytest.fixture
def entry(cluster: Cluster, cfg: Any) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Runs the entry program, or what a test makes of it, and returns its variables."""
    ran: list[dict[str, Any]] = []

    def enter(text: str) -> dict[str, Any]:
        names = names_of(cfg)
        ran.append(names)
        run(text, names)
        return names

    yield enter
    for names in ran:
        for group in GROUPS:
            names[group].shutdown()


def state_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


def test_the_entry_program(
    entry: Callable[[str], dict[str, Any]], cfg: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    names = entry(ENTRY)
    assert names["actor_group"].worker_group_name == "TheActors"
    folder = names["runner"].record.folder
    state = state_of(folder.path)
    assert (state["status"], state["step"], state["recipe"]) == ("finished", 2, "embodied")
    assert len(folder.metrics_file.read_text().splitlines()) == 2
    assert folder.checkpoints.latest() is not None
    config = load_job(str(folder.config_file), environ={})
    assert config.ok, [diagnostic.message for diagnostic in config.diagnostics]
    assert config.config is not None
    assert config.config.model_dump() == cfg.model_dump()
    assert str(folder.path) in capsys.readouterr().err


@pytest.mark.nightly
def test_a_training_loop_by_hand(entry: Callable[[str], dict[str, Any]]) -> None:
    last_line = "runner.run()\n"
    assert ENTRY.endswith(last_line)
    names = entry(ENTRY.removesuffix(last_line))
    runner = names["runner"]
    groups = {name: names[name] for name in GROUPS}
    actor = names["actor_group"] = Handles(groups["actor_group"])
    # It is a method there, and is called without an object.
    definitions, loop = LOOP.split("\n\n\nfor step in", maxsplit=1)
    run(definitions, names)
    names |= {"training_step": 2, "generate_rollouts": partial(names["generate_rollouts"], None)}
    run(f"for step in{loop}", names)
    trained = [metrics for handle in actor.handles["run_training"] for metrics in handle.wait()]
    for handle in actor.handles["compute_advantages_and_returns"]:
        handle.wait()
    by_hand = runner.record.folder.path
    runner.shutdown()
    for name, group in groups.items():
        names[name] = group
        group.shutdown()
    assert state_of(by_hand)["status"] == "finished"

    runner = entry(ENTRY)["runner"]
    metrics = [json.loads(line)["metrics"] for line in runner.record.folder.metrics_file.read_text().splitlines()]
    assert runner.record.folder.path != by_hand
    for mine, theirs in zip(trained, metrics, strict=True):
        # Speed and memory differ from run to run.
        mine = {name: value for name, value in mine.items() if not name.startswith(("speed/", "memory/"))}
        assert mine == {name: theirs[name] for name in mine}, "the steps that nobody numbered are those of the runner"


@pytest.mark.nightly
def test_a_run_that_fails_says_so_in_its_folder(entry: Callable[[str], dict[str, Any]]) -> None:
    names = entry(ENTRY.partition("runner.init_workers()")[0])
    names["env_group"].shutdown()
    with pytest.raises(Exception, match="not running"):
        names["runner"].init_workers()
    state = state_of(names["runner"].record.folder.path)
    assert state["status"] == "failed"
    assert "not running" in state["reason"]
