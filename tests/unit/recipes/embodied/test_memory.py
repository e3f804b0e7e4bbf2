"""The forecast of memory: sizes by hand, and what saves some."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.memory import job_forecast
from recipes.embodied.memory.heap_gaps import Gaps
from rlinf_core import load_job
from rlinf_core.job.process_forecast import ProcessForecast

# An empty process of each kind, in bytes.
BASES = {"actor": {"init": 100, "train": 120}, "rollout": {"init": 90, "act": 95}, "env": {"start": 50}}


@pytest.fixture(autouse=True)
def bases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_forecast, "empty_process", lambda component, model_type, modules=(): BASES[component])  # pyright: ignore
    monkeypatch.setattr(job_forecast, "gaps", lambda *given, imitates=False: Gaps(0, 0))  # pyright: ignore


def config_of(*overrides: str) -> Any:
    job = load_job("laptop", overrides)
    job.raise_if_bad()
    return job.config


def forecast(*overrides: str, actors: int = 1) -> dict[str, ProcessForecast]:
    found = job_forecast.forecast(config_of(*overrides), {"actor": actors, "rollout": 1, "env": 1})
    return {each.component: each for each in found}


def parts(found: ProcessForecast, phase: str) -> dict[str, int]:
    return dict(next(each.parts for each in found.phases if each.phase == phase))


def test_weights_are_counted_without_their_memory() -> None:
    # Two networks of two hidden layers; 21 states, 8 actions and their deviations, one value.
    width, states, actions = 64, 21, 8
    hidden = states * width + width + width * width + width
    numbers = 2 * hidden + actions * width + actions + actions + width + 1
    actor = forecast(f"actor.model.hidden_dim={width}")["actor"]
    found = parts(actor, "run_training")
    assert found["base"] == 120
    assert found["weights"] == found["gradients"] == 4 * numbers
    assert found["optimizer"] == 8 * numbers
    assert found["sent weights"] == 4 * numbers
    # All weights, and what the largest layer, a square, is made from: three of its size.
    assert parts(actor, "init_worker") == {"base": 100, "weights": 4 * numbers + 12 * width * width}


def test_what_a_rollout_takes_grows_with_the_environments() -> None:
    few, many = (forecast(f"env.train.total_num_envs={count}") for count in (64, 128))
    for component, phase, part in (
        ("actor", "recv_rollout_batch", "trajectories"),
        ("actor", "run_training", "advantages"),
        ("actor", "run_training", "batch"),
        ("rollout", "generate", "trajectories"),
        ("env", "interact", "observations"),
    ):
        assert parts(many[component], phase)[part] == 2 * parts(few[component], phase)[part]
    # 21 states and 8 actions with their log-probabilities, a reward, three flags, two values.
    assert parts(few["rollout"], "generate")["trajectories"] == 2 * 64 * 50 * (4 * (21 + 2 * 8 + 1 + 2) + 3)


def test_shards_are_parts_of_weights_and_are_sent_whole() -> None:
    whole, half = (parts(forecast(actors=count)["actor"], "run_training") for count in (1, 2))
    assert half["weights"] == whole["weights"] // 2
    # Gathered, and in shared memory.
    assert half["sent weights"] == 2 * whole["sent weights"]


def test_weights_that_are_sent_behind_rollouts_are_copied() -> None:
    waiting, behind = (
        parts(forecast(f"runner.max_staleness={staleness}")["actor"], "run_training") for staleness in (0, 1)
    )
    assert behind["sent weights"] == 2 * waiting["sent weights"]


@pytest.mark.parametrize(
    "overrides",
    [
        ("actor.model.model_type=flow_policy",),
        (
            "env.train.env_type=franka_vision",
            "env.train.task=touch",
            "env.train.options={image_size: 64}",
            "actor.model.model_type=cnn_policy",
        ),
        *(
            pytest.param(
                ("env.train.env_type=franka_vision", "env.train.task=touch", f"actor.model.model_type={model}"),
                marks=pytest.mark.nightly,
            )
            for model in ("vlm_policy", "pi0")
        ),
    ],
)
def test_every_policy_has_a_forecast(overrides: tuple[str, ...]) -> None:
    found = forecast(*overrides)
    assert parts(found["actor"], "run_training")["activations"] > 0
    assert parts(found["rollout"], "generate")["weights"] > 0


def test_gaps_are_those_of_a_heap_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    without = forecast()["actor"]
    monkeypatch.setattr(job_forecast, "gaps", lambda *given, imitates=False: Gaps(learning=10**8, resting=10**9))  # pyright: ignore
    actor = forecast()["actor"]
    assert parts(actor, "run_training")["gaps"] == 10**8
    waiting = parts(actor, "recv_rollout_batch")
    # What is kept of freed blocks is a part of them.
    assert waiting["kept"] + waiting["gaps"] == 10**9
    assert actor.peak > without.peak + 10**8
    assert actor.on_host(accelerated=True) == without.on_host(accelerated=True)
    assert actor.on_device == without.on_device


def test_a_policy_of_billions_of_weights_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_forecast, "_LARGEST_TRIED", 1000)
    monkeypatch.setattr(job_forecast, "gaps", lambda *given, imitates=False: pytest.fail("it was tried"))  # pyright: ignore
    assert "gaps in the heap are not counted: a policy of this size trains on accelerators" in forecast()["actor"].notes


def test_gaps_that_cannot_be_known_have_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def gaps(*given: object, **named: object) -> Gaps:
        raise RuntimeError("can't allocate memory\nmore")

    monkeypatch.setattr(job_forecast, "gaps", gaps)
    actor = forecast()["actor"]
    assert parts(actor, "run_training")["gaps"] == 0
    assert "gaps in the heap are not counted: can't allocate memory" in actor.notes


RLPD = (
    "actor.model={model_type: squashed_policy, hidden_dim: 32}",
    "algorithm.loss_type=sac",
    "algorithm.off_policy={critics: 3, replay: {capacity: 10000}}",
)
SEEN = (*RLPD, "env.train.env_type=franka_vision", "env.train.task=touch")


def test_replay_buffers_and_critics_are_counted() -> None:
    found = parts(forecast(*RLPD)["actor"], "run_training")
    # 21 states, 8 actions, a reward and flags.
    assert found["replay"] == 10_000 * (4 * 21 + 4 * 8 + 5)
    hidden = 29 * 32 + 32 + 32 * 32 + 32
    assert found["critics"] == 5 * 4 * 3 * (hidden + 33)
    assert parts(forecast(*RLPD, actors=2)["actor"], "run_training")["replay"] == found["replay"] // 2
    assert "replay" not in parts(forecast()["actor"], "run_training")


def test_interventions_have_a_buffer_of_their_own() -> None:
    helped = ("env.train.intervention.source=scripted", "algorithm.off_policy.replay.interventions_capacity=1000")
    alone, with_them = (parts(forecast(*RLPD, *more)["actor"], "run_training")["replay"] for more in ((), helped))
    assert with_them == alone * 11 // 10


def test_compressed_images_take_what_they_are_given() -> None:
    plain = parts(forecast(*SEEN)["actor"], "run_training")["replay"]
    image, rest = 32 * 32 * 3, 4 * 10 + 4 * 3 + 5
    assert plain == 10_000 * (image + rest)
    given = ("algorithm.off_policy.replay.image_memory_gib=0.01",)
    assert parts(forecast(*SEEN, *given)["actor"], "run_training")["replay"] == 10_000 * rest + int(0.01 * 2**30)


def test_spilled_buffers_use_their_memory_and_report_disk() -> None:
    plain = parts(forecast(*SEEN)["actor"], "run_training")["replay"]
    spilled = forecast(*SEEN, "algorithm.off_policy.replay={memory_gib: 0.01, spill_path: /tmp/rows, capacity: 10000}")
    assert parts(spilled["actor"], "run_training")["replay"] == int(0.01 * 2**30)
    assert spilled["actor"].notes == (
        f"the replay buffers take {(plain - int(0.01 * 2**30)) / 2**30:.1f} GiB of disk in /tmp/rows",
    )
    roomy = forecast(*SEEN, "algorithm.off_policy.replay={memory_gib: 1, spill_path: /tmp/rows, capacity: 10000}")
    assert parts(roomy["actor"], "run_training")["replay"] == plain
    assert roomy["actor"].notes == ()


def test_an_arm_that_is_elsewhere_needs_not_answer() -> None:
    job = load_job("franka_hil", ["data.train_data_paths=null"])
    job.raise_if_bad()
    assert isinstance(job.config, EmbodiedConfig)
    found = {each.component: each for each in job_forecast.forecast(job.config, {"actor": 1, "rollout": 1, "env": 2})}
    rows = 200_000  # of all steps, and of interventions
    assert parts(found["actor"], "run_training")["replay"] == rows * (4 * 16 + 4 * 7 + 5)
