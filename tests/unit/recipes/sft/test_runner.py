"""The loop of recipe `sft`, `recipes.sft.sft_program`: what it asks of which workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.orientation import PicturesShown, thumbnails
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.sft import sft_program as module
from recipes.sft.config import SftConfig
from recipes.sft.sft_program import SftRunner
from rlinf_core import Channel
from rlinf_core.runners.metrics import MetricsWriter, read_metrics
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.storage.first_contact import ContactCheck, read_comparisons
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.unit.recipes.demonstrations.scenes import scenes
from tests.unit.recipes.sft.conftest import ALONE

SPEC = EnvSpec(21, 8)
ROWS = ContactCheck("actor", "rows", "their description")


class Done:
    """A call that is answered."""

    def __init__(self, *by_rank: Any) -> None:
        self._by_rank = list(by_rank)

    def wait(self, timeout: float | None = None) -> list[Any]:
        return self._by_rank


class Group:
    """A worker group that notes what it is asked for."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]], answers: dict[str, tuple[Any, ...]]) -> None:
        self.worker_group_name, self.world_size = name, len(answers.get("ranks", (0,)))
        self._calls, self.answers = calls, answers

    def __getattr__(self, method: str) -> Callable[..., Done]:
        def call(*arguments: Any) -> Done:
            self._calls.append((self.worker_group_name, method, *arguments))
            return Done(*self.answers.get(method, (None,)))

        return call

    def memory_peaks(self) -> Done:
        return Done()

    call_records = memory_peaks

    def shutdown(self) -> None:
        self._calls.append((self.worker_group_name, "shutdown"))


class Loop:
    """A loop over such groups, and what was asked of them."""

    def __init__(
        self, config: SftConfig, folder: RunFolder, record: RunRecord, *, evaluates: bool, spec: EnvSpec
    ) -> None:
        self.calls: list[tuple[Any, ...]] = []
        two = ({"actor/bc_loss": 1.0}, {"actor/bc_loss": 3.0})
        self.groups: dict[str, Any] = {
            "actor": Group(
                "actor",
                self.calls,
                {"ranks": (0, 1), "learn": two, "load_checkpoint": (7, 7), "compared": ([ROWS], [])},
            )
        }
        if evaluates:
            self.groups["rollout"] = Group("rollout", self.calls, {})
            self.groups["env"] = Group("env", self.calls, {"init_worker": (spec,), "evaluate": ({"return": (6.0, 3)},)})
        self.folder = folder
        self.runner = SftRunner(config, self.groups, record)

    def answer(self, group: str, **answers: tuple[Any, ...]) -> None:
        self.groups[group].answers.update(answers)

    def asked(self, method: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[1] == method]


@pytest.fixture
def loop(
    config_of: Callable[..., SftConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Loop]]:
    create = Channel.create
    monkeypatch.setattr(module.Channel, "create", lambda name: create(name, local=True))
    for word in ("recipes.sft.sft_program", "rlinf_core.runners.runner", "recipes.training.comparing_worker"):
        monkeypatch.setattr(f"{word}.wait_together", lambda *calls: [call.wait() for call in calls])
    records: list[RunRecord] = []

    def made(*overrides: str, evaluates: bool = True, cameras: Any = None) -> Loop:
        config = config_of(f"runner.logger.log_path={tmp_path / 'runs'}", *overrides, *(() if evaluates else ALONE))
        folder = RunFolder.create(config.runner, "sft")
        records.append(RunRecord(folder, MetricsWriter(folder.metrics_file), lambda event: None))
        spec = replace(SPEC, cameras=cameras or {})
        return Loop(config, folder, records[-1].__enter__(), evaluates=evaluates, spec=spec)

    yield made
    for record in records:
        record.__exit__(None, None, None)


def test_environments_say_what_the_policy_is_made_for(loop: Callable[..., Loop]) -> None:
    made = loop()
    made.runner.init_workers()
    ((*_, layout, spec),) = made.asked("init_actor")
    assert spec == SPEC
    assert (layout.actors, layout.rollouts, layout.envs) == (2, 1, 1)
    assert ("rollout", "init_worker", layout, SPEC) in made.calls


def test_actors_say_what_is_compared_before_training(actor_of: Callable[..., Any]) -> None:
    actor = actor_of(spec=replace(SPEC, cameras={"main": (16, 16, 3)}))
    (shown,) = actor.first_pictures()
    assert shown.cameras["main"].shape[0] == 2
    facts = actor.data_facts()
    assert (facts.fps, facts.instructions, facts.cameras) == (20, ("pick it up",), {"main": "main"})
    assert (len(facts.actions), facts.guessed, facts.reads_instructions) == (8, (), False)


def test_pictures_are_compared_before_training(loop: Callable[..., Loop]) -> None:
    upright, seen = thumbnails(scenes(8, seed=2)), thumbnails(scenes(6, seed=1))
    made = loop(cameras={"main": (48, 48, 3)})
    made.answer("actor", first_pictures=([PicturesShown("set", "none", {"main": upright[:, ::-1]})], []))
    made.answer("env", first_pictures=({"main": seen},))
    with pytest.raises(DatasetError, match="are not oriented as the environment's"):
        made.runner.init_workers()
    assert made.asked("learn") == []
    assert [comparison.verdict for comparison in read_comparisons(made.folder.path) if comparison != ROWS] == [
        "differs"
    ]


def test_without_environments_the_data_say_it(loop: Callable[..., Loop]) -> None:
    made = loop(evaluates=False)
    made.runner.init_workers()
    ((*_, spec),) = made.asked("init_actor")
    assert spec is None
    assert made.runner.evaluate_policy(1) is None


def test_a_run_learns_and_evaluates_in_turn(loop: Callable[..., Loop]) -> None:
    made = loop(
        "runner.val_check_interval=2", "runner.max_steps=4", "runner.save_interval=-1", "runner.val_before_train=false"
    )
    made.runner.init_workers()
    made.runner.run()
    order = [(method, *rest) for group, method, *rest in made.calls if method in ("learn", "sync_model_to_rollout")]
    assert order == [
        ("learn", 1),
        ("learn", 2),
        ("sync_model_to_rollout",),
        ("learn", 3),
        ("learn", 4),
        ("sync_model_to_rollout",),
    ]
    metrics = read_metrics(made.folder.metrics_file)
    # The mean over the ranks of the actor.
    assert {record.metrics["actor/bc_loss"] for record in metrics if "actor/bc_loss" in record.metrics} == {2.0}
    assert made.runner.weight_version == 4


def test_weights_are_sent_once_for_each_version(loop: Callable[..., Loop]) -> None:
    made = loop()
    made.runner.init_workers()
    for _ in range(2):
        made.runner.evaluate_policy(0)
    assert len(made.asked("sync_model_from_actor")) == 1
    made.runner.train(1)
    made.runner.evaluate_policy(1)
    assert len(made.asked("sync_model_from_actor")) == 2


def test_what_workers_compare_stands_in_the_run_folder(loop: Callable[..., Loop]) -> None:
    made = loop()
    made.runner.init_workers()
    assert read_comparisons(made.folder.path) == [ROWS]
    for _ in range(2):
        made.runner.evaluate_policy(0)
    rows, steps = read_comparisons(made.folder.path)
    assert (rows, steps.component, steps.what) == (ROWS, "env", "first observations and step of env.eval")


def test_a_checkpoint_is_the_actors(loop: Callable[..., Loop], tmp_path: Path) -> None:
    made = loop()
    made.runner.write_checkpoint(tmp_path)
    made.runner.read_checkpoint(tmp_path)
    assert made.calls == [("actor", "save_checkpoint", str(tmp_path)), ("actor", "load_checkpoint", str(tmp_path))]
    assert made.runner.weight_version == 7


def test_the_end_of_a_run_ends_its_workers(loop: Callable[..., Loop]) -> None:
    made = loop()
    made.runner.init_workers()
    made.runner.shutdown()
    assert sorted(cast("str", group) for group, *_ in made.asked("shutdown")) == ["actor", "env", "rollout"]
