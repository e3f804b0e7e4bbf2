"""What every policy by flow matching or tokens has to do, whatever its network is, on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_config import policy_model
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.normalization import Normalization, Statistics
from recipes.embodied.models.policy_folder import save_policy
from recipes.embodied.models.registry import make_model
from recipes.embodied.models.vla.vision_language import built_tokenizer
from rlinf_core.errors import ConfigError
from tests.unit.recipes.embodied.models import two_policy_ranks
from tests.unit.recipes.embodied.models.openvla import openvla_folder
from tests.unit.recipes.embodied.models.vla import pi_folders
from tests.unit.recipes.two_processes import run_two

pytest.importorskip("transformers", reason="the extra `language` is not installed")
N, CHUNK, SIZE = 3, 2, 28
_IMAGES = {"main": (SIZE, SIZE, 3)}


@dataclass(frozen=True)
class Case:
    """A policy.

    Attributes:
        model: its section.
        spec: the environment that it fits.
        writes: writes the published folder that it is loaded from; None: it is built.
        room: prompt tokens that are left beside its own prompt; 0: it reads none.
        adapted: how names of weights begin that LoRA adds to; empty: it has no adapters.
    """

    model: dict[str, Any]
    spec: EnvSpec
    writes: Callable[[Path], Any] | None = None
    room: int = 0
    adapted: tuple[str, ...] = ()


def lerobot(folder: Path) -> None:
    folder.mkdir()
    pi_folders.write_lerobot(folder)
    built_tokenizer().save_pretrained(str(folder))


_ARM = EnvSpec(10, 3, cameras=_IMAGES, has_instructions=True)
_HAND = EnvSpec(0, 4, cameras=_IMAGES, has_instructions=True)
_BUILT = {"num_layers": 1, "statistics": "none"}
CASES: dict[str, Case] = {
    "flow": Case({"model_type": "flow_policy", "options": {"steps": 4}}, EnvSpec(10, 3, cameras={"main": (36, 36, 3)})),
    "flow_one": Case({"model_type": "flow_policy", "options": {"steps": 4, "noisy_steps": "one"}}, EnvSpec(10, 3)),
    "flow_ahead": Case({"model_type": "flow_policy", "options": {"steps": 4, "action_horizon": 5}}, EnvSpec(10, 3)),
    "pi0": Case(
        {"model_type": "pi0", "options": {**_BUILT, "max_prompt_tokens": 7, "steps": 3}},
        _ARM,
        room=20,
        adapted=(".dit.", ".vlm."),
    ),
    "pi05": Case(
        {"model_type": "pi05", "options": {**_BUILT, "max_prompt_tokens": 120, "steps": 3}},
        _ARM,
        room=140,
        adapted=(".expert.", ".vlm."),
    ),
    "pi05_lerobot": Case(
        {"model_type": "pi05", "options": {"max_prompt_tokens": 120, "steps": 3, "noisy_steps": "one"}}, _ARM, lerobot
    ),
    "openvla": Case(
        {"model_type": "openvla", "options": {"num_layers": 1}}, _HAND, room=80, adapted=("language_model.",)
    ),
    "openvla_oft": Case({"model_type": "openvla_oft", "options": {"num_layers": 1}}, _HAND, room=80),
    "openvla_published": Case({"model_type": "openvla"}, _HAND, openvla_folder.write),
    "openvla_oft_published": Case({"model_type": "openvla_oft"}, _HAND, openvla_folder.write),
}
READING = [name for name, case in CASES.items() if case.room]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str | None]:
    home = tmp_path_factory.mktemp("published")

    def folder(name: str) -> str | None:
        writes = CASES[name].writes
        if writes is not None and not (home / name).exists():
            writes(home / name)
        return None if writes is None else str(home / name)

    return folder


def section(name: str, path: str | None = None, **model: Any) -> EmbodiedModelConfig:
    case = CASES[name].model
    options = {**case.get("options", {}), **model.pop("options", {})}
    return policy_model(
        {"hidden_dim": 32, "num_action_chunks": CHUNK, "model_path": path, **case, "options": options, **model}
    )


def made(name: str, path: str | None = None, **model: Any) -> Any:
    torch.manual_seed(0)
    return make_model(section(name, path, **model), CASES[name].spec)


def seen(name: str) -> dict[str, Any]:
    spec, random = CASES[name].spec, np.random.default_rng(1)
    rows: dict[str, Any] = {
        f"images.{camera}": random.integers(0, 256, (N, *shape), np.uint8) for camera, shape in spec.cameras.items()
    }
    if spec.state_size:
        rows["states"] = random.normal(size=(N, spec.state_size)).astype(np.float32)
    return rows | (
        {"instructions": np.array(["touch the red point", "push", "open it"])} if spec.has_instructions else {}
    )


def response(policy: Any, rows: dict[str, Any]) -> torch.Tensor:
    """Return what a policy makes of observations, which changes with them: log-probabilities of the same actions."""
    inputs = policy.prepare(rows)
    drawn = policy.act(inputs, generator=torch.Generator().manual_seed(3)).actions
    return policy(inputs, torch.zeros_like(drawn)).logprobs.float()


@pytest.mark.parametrize(
    ("name", "precision"), [*((name, "float32") for name in CASES), *((name, "bfloat16") for name in READING)]
)
def test_what_is_drawn_is_what_is_evaluated(name: str, precision: str, folders: Callable[[str], str | None]) -> None:
    policy = made(name, folders(name)).to(getattr(torch, precision))
    inputs = policy.prepare(seen(name))
    output = policy.act(inputs, generator=torch.Generator().manual_seed(0))
    again = policy(inputs, output.actions)
    assert not output.logprobs.requires_grad
    assert again.entropy.shape == output.logprobs.shape
    # Tokens of OpenVLA are written one by one, and read together.
    bound = 0.1 if precision == "bfloat16" and name == "openvla" else 1e-4
    for mine, theirs in (
        (again.logprobs, output.logprobs),
        (again.values, output.values),
        (policy.values(inputs), output.values),
    ):
        torch.testing.assert_close(mine.float(), theirs.float(), atol=bound, rtol=0)
    assert policy.to_env(output.actions).shape == (N, CHUNK, CASES[name].spec.action_size)
    repeated = policy.act(inputs, generator=torch.Generator().manual_seed(0)).actions
    assert torch.equal(repeated, output.actions)
    assert not torch.equal(policy.act(inputs, generator=torch.Generator().manual_seed(1)).actions, output.actions)


@pytest.mark.parametrize("name", READING)
def test_it_sees_reads_and_feels(name: str) -> None:
    policy, rows = made(name), seen(name)
    before = response(policy, rows)
    changes: dict[str, Any] = {
        "images.main": 255 - rows["images.main"],
        "instructions": np.array(["lift it"] * N),
        **({"states": rows["states"] + 1} if "states" in rows else {}),
    }
    for key, value in changes.items():
        assert (response(policy, {**rows, key: value}) - before).abs().max() > 1e-6, key


@pytest.mark.parametrize("name", READING)
def test_padding_and_other_rows_change_nothing(name: str) -> None:
    rows, longer = seen(name), made(name, options={"max_prompt_tokens": CASES[name].room})
    policy = made(name)
    first, padded = (item.act(item.prepare(rows), greedy=True) for item in (policy, longer))
    torch.testing.assert_close(padded.actions, first.actions, atol=1e-5, rtol=0)
    torch.testing.assert_close(padded.values, first.values, atol=1e-5, rtol=0)
    alone = policy.act(policy.prepare({key: value[1:2] for key, value in rows.items()}), greedy=True)
    torch.testing.assert_close(alone.actions, first.actions[1:2], atol=1e-5, rtol=0)
    with pytest.raises(ConfigError, match="`max_prompt_tokens: "):
        policy.prepare({**rows, "instructions": np.array(["xyzzy" * 40] * N)})


# `flow_policy` learns more: `test_flow_policy.py`.
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("flow")])
def test_it_learns_from_demonstrations(name: str, folders: Callable[[str], str | None]) -> None:
    policy, size = made(name, folders(name)), CASES[name].spec.action_size
    inputs = policy.prepare(seen(name))
    shown = np.random.default_rng(0).uniform(-0.5, 0.5, (N, policy.horizon or CHUNK, size)).astype(np.float32)
    wanted = policy.from_env(shown)
    optimizer = torch.optim.Adam([weight for weight in policy.parameters() if weight.requires_grad], lr=2e-3)
    losses: list[float] = []
    for _ in range(60):
        loss = policy.imitation_losses(inputs, wanted).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert np.mean(losses[-15:]) < 0.7 * np.mean(losses[:5])


@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_move_what_is_drawn(name: str, folders: Callable[[str], str | None]) -> None:
    """Steps on the log-probability of what was drawn make it likelier: what reinforcement learning needs."""
    policy = made(name, folders(name))
    inputs = policy.prepare(seen(name))
    drawn = policy.act(inputs, generator=torch.Generator().manual_seed(0)).actions
    optimizer = torch.optim.Adam([weight for weight in policy.parameters() if weight.requires_grad], lr=1e-4)
    sums: list[float] = []
    for _ in range(4):
        total = policy(inputs, drawn).logprobs.sum()
        optimizer.zero_grad()
        (-total).backward()
        optimizer.step()
        sums.append(float(total.detach()))
    assert sums == sorted(sums)
    assert sums[-1] > sums[0]


@pytest.mark.parametrize("name", CASES)
def test_it_comes_back_from_its_folder(name: str, folders: Callable[[str], str | None], tmp_path: Path) -> None:
    policy, spec = made(name, folders(name)), CASES[name].spec
    if CASES[name].writes is None and spec.state_size:
        rows = np.random.default_rng(0).normal(size=(9, spec.state_size + spec.action_size))
        policy.normalization = Normalization(
            "quantile", Statistics.of(rows[:, : spec.state_size]), Statistics.of(rows[:, spec.state_size :])
        )
    save_policy(policy, section(name, folders(name)), spec, tmp_path / "saved")
    torch.manual_seed(1)
    again = make_model(section(name, str(tmp_path / "saved")), spec)
    assert again.normalization == policy.normalization
    assert again.describe_images() == policy.describe_images()
    assert all(torch.equal(weight, again.state_dict()[key]) for key, weight in policy.state_dict().items())
    taken = [item.to_env(item.act(item.prepare(seen(name)), greedy=True).actions) for item in (policy, again)]
    assert np.array_equal(taken[0], taken[1])
    if CASES[name].adapted:
        adapted = make_model(section(name, str(tmp_path / "saved"), lora={"rank": 2}), spec)
        output = adapted.act(adapted.prepare(seen(name)), greedy=True)
        np.testing.assert_allclose(adapted.to_env(output.actions), taken[0], atol=1e-4)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.adapted])
def test_adapters_choose_what_is_trained_and_are_saved(name: str, tmp_path: Path) -> None:
    policy = made(name, lora={"rank": 2})
    trained = {key for key, weight in policy.named_parameters() if weight.requires_grad}
    assert all("lora_" in key or key.startswith("critic.") for key in trained)
    for part in CASES[name].adapted:
        assert any(part in key and "lora_A" in key for key in trained), part
    save_policy(policy, section(name, lora={"rank": 2}), CASES[name].spec, tmp_path / "saved")
    again = make_model(section(name, str(tmp_path / "saved"), lora={"rank": 2}), CASES[name].spec)
    results = [item.act(item.prepare(seen(name)), greedy=True).actions for item in (policy, again)]
    assert torch.equal(results[0], results[1])
    with pytest.raises(ConfigError, match="matches `nothing"):
        made(name, trainable=["nothing.*"])


@pytest.mark.parametrize("name", READING)
def test_checkpointed_activations_give_the_same_gradients(name: str) -> None:
    gradients: list[dict[str, torch.Tensor]] = []
    inputs = made(name).prepare(seen(name))
    actions = made(name).act(inputs, generator=torch.Generator().manual_seed(0)).actions
    for again in (False, True):
        policy = made(name)
        if again:
            policy.checkpoint_activations()
        result = policy(inputs, actions)
        (result.logprobs.sum() + result.values.sum()).backward()
        gradients.append({key: weight.grad for key, weight in policy.named_parameters() if weight.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][key], msg=key)


@pytest.mark.parametrize("name", ["flow", "pi0", "pi05", "openvla", "openvla_oft"])
def test_without_a_value_head_there_are_no_values(name: str) -> None:
    policy = made(name, add_value_head=False)
    inputs = policy.prepare(seen(name))
    assert policy.act(inputs).values is None
    with pytest.raises(ValueError, match="no value head"):
        policy.values(inputs)


@pytest.mark.parametrize("name", READING)
def test_environments_without_images_or_numbers_are_refused(name: str) -> None:
    for spec, message in (
        (EnvSpec(4, 2), "needs images"),
        (EnvSpec(4, 1, num_choices=2, cameras=_IMAGES), "needs continuous actions"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_model(section(name), spec)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the first of two processes made of every case."""
    return run_two(two_policy_ranks.__name__, tmp_path_factory.mktemp("ranks"))[0]


@pytest.mark.parametrize("name", two_policy_ranks.CASES)
def test_two_ranks_learn_what_one_learns(shared: dict[str, Any], name: str) -> None:
    alone, both = two_policy_ranks.train(two_policy_ranks.CASES[name], 0, 1), shared[name]
    assert both["blocks"] == (0 if name == "mlp_policy" else alone["blocks"])
    assert both["before"].keys() == alone["before"].keys()
    for weight, value in alone["before"].items():
        assert torch.equal(both["before"][weight], value), weight
    assert both["norm"] == pytest.approx(alone["norm"], rel=1e-4)
    assert alone["norm"] > 0
    # A first step of Adam is one of the sign: where a gradient is nearly 0 it may be another one.
    for weight, value in alone["after"].items():
        differs = (both["after"][weight] - value).abs() > 1e-6
        assert differs.float().mean() < 0.02, weight


def test_layers_of_both_models_are_gathered_by_themselves(shared: dict[str, Any]) -> None:
    # Three layers that read and three of each tower; in pi0 three of the expert, and five parts of each that reads.
    assert shared["openvla"]["blocks"] == 9
    assert shared["pi0"]["blocks"] == 3 + 3 + 3 * 5
