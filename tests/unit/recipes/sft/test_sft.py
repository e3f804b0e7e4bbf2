"""The recipe `sft`: its file, program, loop, the actor that learns from demonstrations, the forecast of its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from recipes.demonstrations.columns import DatasetError
from recipes.demonstrations.first_comparison import PicturesShown, thumbnails
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.normalization import Normalization
from recipes.embodied.models.policy_folder import load_trained
from recipes.embodied.models.registry import make_model
from recipes.sft import sft_program
from recipes.sft import sft_program as module
from recipes.sft.config import SftConfig
from recipes.sft.sft_program import SftRunner
from recipes.training.arrays import NonFiniteError
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core import Channel, CheckpointError, ConfigError
from rlinf_core.runners.metrics import MetricsWriter, read_metrics
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.storage.first_contact import ContactCheck, read_comparisons
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.known import known
from tests.unit.recipes.demonstrations.test_pictures import scenes
from tests.unit.recipes.sft.conftest import ACTIONS, ALONE, LENGTHS, STATES


def weights(actor: Any) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = actor._policy.state_dict()
    return {name: value.clone() for name, value in state.items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one)


def test_a_step_learns_from_so_many_batches(actor_of: Callable[..., Any]) -> None:
    actor = actor_of()
    steps: list[int] = []
    actor._state.optimizer.register_step_post_hook(lambda *arguments: steps.append(1))
    metrics = actor.learn(2)
    assert len(steps) == 4
    # Two steps of four batches of 16 rows each.
    assert metrics["train/epoch"] == 2 * 4 * 16 / sum(LENGTHS)
    assert metrics["train/actor/lr"] == actor._config.actor.optim.lr
    assert actor._state.version == 1


def test_what_was_shown_is_learned(actor_of: Callable[..., Any]) -> None:
    actor = actor_of("data.batches_per_step=60", "actor.optim.lr=0.01")
    first, *_, last = [actor.learn(step)["train/actor/bc_loss"] for step in (1, 2, 3)]
    assert last < first - 1


def test_what_a_step_draws_depends_on_its_number_alone(actor_of: Callable[..., Any]) -> None:
    one, other, later = actor_of(), actor_of(), actor_of()
    torch.manual_seed(1)
    one.learn(1)
    torch.manual_seed(2)
    other.learn(1)
    later.learn(2)
    assert same(weights(one), weights(other))
    assert not same(weights(one), weights(later))


def test_a_batch_is_learned_from_in_parts(actor_of: Callable[..., Any]) -> None:
    actor = actor_of("actor.micro_batch_size=4")
    sizes: list[int] = []
    loss = actor._shown.loss
    actor._shown.loss = lambda policy, rows: (sizes.append(rows), loss(policy, rows))[1]
    actor.learn(1)
    assert sizes == [4] * 16


def test_rows_that_fill_no_part_are_not_counted(actor_of: Callable[..., Any]) -> None:
    metrics = actor_of("actor.global_batch_size=null", "actor.micro_batch_size=4").learn(1)
    assert metrics["train/epoch"] == pytest.approx(4 * 8 / sum(LENGTHS))


def test_statistics_of_the_data_become_the_policys(actor_of: Callable[..., Any], tmp_path: Path) -> None:
    assert actor_of("data.normalization=none")._policy.normalization == Normalization()
    actor = actor_of()
    normalization = actor._policy.normalization
    assert normalization.scheme == "mean_std"
    assert np.allclose(known(normalization.actions).mean, actor._shown.demonstrations.actions.mean(axis=0), atol=1e-6)


def test_reinforcement_learning_goes_on_from_what_was_learned(actor_of: Callable[..., Any], tmp_path: Path) -> None:
    actor = actor_of()
    actor.learn(1)
    actor.save_checkpoint(str(tmp_path / "global_step_1"))
    spec = EnvSpec(STATES, ACTIONS, has_instructions=True)
    policy = make_model(actor._config.actor.model, spec)
    model = actor._config.actor.model
    load_trained(policy, model, spec, str(tmp_path / "global_step_1"))
    assert same(dict(policy.state_dict()), weights(actor))
    assert policy.normalization == actor._policy.normalization


def test_a_run_goes_on_as_if_it_had_not_stopped(actor_of: Callable[..., Any], tmp_path: Path) -> None:
    through, stopped, resumed = actor_of(), actor_of(), actor_of()
    for step in (1, 2):
        through.learn(step)
    stopped.learn(1)
    stopped.save_checkpoint(str(tmp_path / "global_step_1"))
    assert resumed.load_checkpoint(str(tmp_path / "global_step_1")) == 1
    resumed.learn(2)
    assert same(weights(through), weights(resumed))


def test_a_checkpoint_of_another_policy_is_refused(actor_of: Callable[..., Any], tmp_path: Path) -> None:
    actor_of("actor.model.hidden_dim=8").save_checkpoint(str(tmp_path / "global_step_1"))
    with pytest.raises(CheckpointError, match="cannot be read") as raised:
        actor_of().load_checkpoint(str(tmp_path / "global_step_1"))
    assert "must have the same sizes as when saved" in (raised.value.help or "")


def test_data_of_another_environment_are_refused(actor_of: Callable[..., Any]) -> None:
    with pytest.raises(DatasetError, match="has 8 numbers in an action; the environment has 4"):
        actor_of(spec=EnvSpec(STATES, 4))


@pytest.mark.parametrize("reaction", ["stop", "skip"])
def test_a_loss_that_is_not_finite_changes_no_weight(actor_of: Callable[..., Any], reaction: str) -> None:
    actor = actor_of(f"runner.on_nonfinite={reaction}")
    actor._shown.demonstrations.actions[:] = np.nan
    before = weights(actor)
    if reaction == "stop":
        with pytest.raises(NonFiniteError):
            actor.learn(1)
    else:
        actor.learn(1)
        assert len(actor.warnings) == 1
    assert same(before, weights(actor))


def test_a_classifier_learns_from_pictures_alone(actor_of: Callable[..., Any]) -> None:
    actor = actor_of("data.target=success", "actor.model.model_type=cnn_policy", "data.batches_per_step=1")
    assert actor._spec == EnvSpec(0, 1, num_choices=2, cameras={"main": (16, 16, 3)})
    assert actor._policy.normalization == Normalization()
    assert actor.learn(1)["train/actor/bc_loss"] > 0


@pytest.fixture
def launched(config_of: Callable[..., SftConfig], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Launches nothing, and tells the components that would have been."""

    def launch(*overrides: str) -> list[str]:
        config = config_of(*overrides)
        placed: list[str] = []
        strategies: Any = SimpleNamespace(get_strategy=lambda name: placed.append(name))
        monkeypatch.setattr(module, "HybridComponentPlacement", lambda *arguments: strategies)
        monkeypatch.setattr(module, "launch_together", lambda cluster, groups: None)
        monkeypatch.setattr(module, "SftRunner", lambda config, groups, record: groups)
        groups: Any = module.launch(config, SimpleNamespace(), SimpleNamespace())  # pyright: ignore[reportArgumentType]
        assert list(groups) == placed
        return placed

    return launch


@pytest.mark.parametrize(
    ("overrides", "components"),
    [
        ((), ["actor", "rollout", "env"]),
        (("runner.val_check_interval=-1",), ["actor"]),
        (ALONE, ["actor"]),
    ],
)
def test_only_a_run_that_evaluates_has_environments(
    launched: Callable[..., list[str]], overrides: tuple[str, ...], components: list[str]
) -> None:
    assert launched(*overrides) == components


def test_missing_folder_ends_the_run_before_it_starts(
    config_of: Callable[..., SftConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of()
    model = config.actor.model.model_copy(update={"model_path": str(tmp_path / "model")})
    job: Any = SimpleNamespace(
        config=config.model_copy(update={"actor": config.actor.model_copy(update={"model": model})})
    )
    started: list[Any] = []
    monkeypatch.setattr(module, "run_job", lambda *arguments: started.append(arguments))
    with pytest.raises(ConfigError, match="does not exist"):
        module.program(job, SimpleNamespace(), lambda event: None)  # pyright: ignore[reportArgumentType]
    assert started == []
    module.program(SimpleNamespace(config=config), SimpleNamespace(), lambda event: None)  # pyright: ignore
    assert len(started) == 1


@pytest.fixture
def codes(shown: Path) -> Callable[..., list[str]]:
    def codes_of(*overrides: str) -> list[str]:
        inputs = any(override.startswith(("data.train", "~data.train")) for override in overrides)
        named = [] if inputs else [f"data.train_data_paths={shown}"]
        return [item.code for item in load_with_lint("sft/pick-laptop", [*overrides, *named], environ={}).diagnostics]

    return codes_of


def test_what_is_checked_offline(codes: Any, shown: Path) -> None:
    assert codes() == []
    assert codes("~data.train_data_paths") == ["missing-key"]
    assert codes("data.train_data_paths=/no/such") == ["unusable-path"]
    assert codes("algorithm.gamma=0.5") == ["not-available"]
    assert codes("actor.global_batch_size=30", "actor.micro_batch_size=8") == ["batch-not-divisible"]
    (shown / "meta" / "stats.json").unlink()
    assert codes() == ["unusable-path"]


def test_environments_are_optional_together(codes: Any) -> None:
    place = "cluster.component_placement"
    joint = f"~{place}.'actor,rollout,env'"
    text = "{node_group: node, placement: 0}"
    assert codes(joint, f"{place}.actor={text}") == []
    assert codes(joint, f"{place}.actor={text}", f"{place}.env={text}") == ["missing-component"]


Configured = Callable[..., SftConfig]


def test_an_actor_holds_weights_and_demonstrations(config_of: Configured, shown: Path) -> None:
    actor, rollout, env = sft_program.forecast(config_of(), {"actor": 1, "rollout": 1, "env": 1})
    # Two networks of two hidden layers of 16; 21 states, 8 actions and their deviations, one value.
    hidden = STATES * 16 + 16 + 16 * 16 + 16
    numbers = 2 * hidden + ACTIONS * 16 + ACTIONS + ACTIONS + 16 + 1
    assert actor.parts["weights"] == actor.parts["gradients"] == actor.parts["sent weights"] == 4 * numbers
    assert actor.parts["optimizer"] == 8 * numbers
    files = sum(path.stat().st_size for path in shown.glob("data/*/*.parquet"))
    # A flag of success stands beside states and actions; all is there twice while it is read.
    assert actor.parts["demonstrations"] == 2 * (sum(LENGTHS) * 4 * (STATES + ACTIONS + 1) + files)
    assert (rollout.component, env.component) == ("rollout", "env")
    assert "trajectories" not in {name for name, size in rollout.parts.items() if size}


def test_activations_grow_with_the_micro_batch(config_of: Configured) -> None:
    few, many = (sft_program.forecast(config_of(f"actor.micro_batch_size={rows}"), {})[0].parts for rows in (4, 8))
    assert many["activations"] > few["activations"]
    assert many["batch"] == 2 * few["batch"]


def test_without_environments_there_is_an_actor_alone(config_of: Configured) -> None:
    (actor,) = sft_program.forecast(config_of(*ALONE), {"actor": 1})
    assert actor.component == "actor"
    assert actor.parts["sent weights"] == 0


def test_an_hdf5_file_declares_no_sizes(config_of: Configured) -> None:
    config = config_of(*ALONE)
    unread = config.model_copy(update={"data": config.data.model_copy(update={"train_data_paths": ("shown.hdf5",)})})
    with pytest.raises(ConfigError, match="not known"):
        sft_program.forecast(unread, {})


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
        answers = {"ranks": (0, 1), "learn": two, "load_checkpoint": (7, 7), "compared": ([ROWS], [])}
        self.groups: dict[str, Any] = {"actor": Group("actor", self.calls, answers)}
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
    assert [check.verdict for check in read_comparisons(made.folder.path) if check != ROWS] == ["differs"]


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
    sent = ("sync_model_to_rollout",)
    assert order == [("learn", 1), ("learn", 2), sent, ("learn", 3), ("learn", 4), sent]
    metrics = read_metrics(made.folder.metrics_file)
    # The mean over the ranks of the actor.
    assert {record.metrics["actor/bc_loss"] for record in metrics if "actor/bc_loss" in record.metrics} == {2.0}
    assert made.runner.weight_version == 4
    made.runner.shutdown()
    assert sorted(cast("str", group) for group, *_ in made.asked("shutdown")) == ["actor", "env", "rollout"]


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
