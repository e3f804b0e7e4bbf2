"""Passes of policies: the precision of weights and layers, compilation, and that the single-process loop learns."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from benchmarks.baselines.single_process_ppo import Outcome, arguments, run
from recipes.embodied.config import EmbodiedActorConfig, EmbodiedModelConfig
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec
from recipes.embodied.envs.franka.franka_kin import FrankaVisionEnv
from recipes.embodied.envs.registry import make_env
from recipes.embodied.learning.policy_precision import acting_types, computing
from recipes.embodied.models.base_policy import BasePolicy, Inputs
from recipes.embodied.models.registry import make_model
from recipes.embodied.workers.actor_base import compile_training, missing_compiler
from recipes.sections.actor import FsdpConfig, OptimConfig
from recipes.training.weights.training_state import TrainingState
from recipes.training.weights.weight_sync import FirstPiece, FlatWeights, piece_messages
from rlinf_core import ConfigError
from tests.known import known

CPU = torch.device("cpu")
STATES = EnvSpec(state_size=6, action_size=4)


def actor(precision: str, **model: Any) -> EmbodiedActorConfig:
    settings = {"model_type": "mlp_policy", "hidden_dim": 64, "precision": precision, **model}
    return EmbodiedActorConfig.model_validate({"model": settings})


def policy_of(config: EmbodiedActorConfig, spec: EnvSpec = STATES) -> BasePolicy:
    torch.manual_seed(0)
    return make_model(config.model, spec)


def trained(policy: nn.Module, config: EmbodiedActorConfig, lr: float) -> TrainingState:
    return TrainingState(
        policy,
        OptimConfig(lr=lr),
        FsdpConfig(),
        rank=0,
        world_size=1,
        device=CPU,
        sent_types=acting_types(policy, config),
    )


class Patchy(nn.Module):
    """A model that keeps one of its layers, and a buffer, in float32 whatever type it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.exact = nn.Linear(4, 4), nn.Linear(4, 2)
        self.tied = self.body
        self.register_buffer("angles", torch.arange(4.0))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Patchy:
        kept = {name: value.detach().clone() for name, value in self.exact.state_dict().items()}
        super()._apply(fn, recurse)
        for name, value in kept.items():
            weight = self.exact.get_parameter(name)
            weight.data = value.to(weight.device)
        return self


class TestActingTypes:
    def test_fp32_asks_for_no_copies(self) -> None:
        config = actor("fp32")
        assert acting_types(policy_of(config), config) is None

    @pytest.mark.parametrize("model_type", ["mlp_policy", "flow_policy", "squashed_policy"])
    def test_types_are_those_of_a_rollout_worker(self, model_type: str) -> None:
        config = actor("bf16", model_type=model_type, num_action_chunks=2 if model_type == "flow_policy" else 1)
        policy = policy_of(config)
        types = acting_types(policy, config)
        assert {weight.dtype for weight in policy.parameters()} == {torch.float32}
        state: dict[str, Tensor] = policy.to(torch.bfloat16).state_dict()
        assert types == {name: value.dtype for name, value in state.items()}

    def test_what_a_model_keeps_exact_is_sent_exact(self) -> None:
        model = Patchy()
        types = acting_types(model, actor("bf16"))
        assert types is not None
        assert types["exact.weight"] == torch.float32
        assert types["body.weight"] == types["tied.weight"] == torch.bfloat16
        assert {weight.device.type for weight in model.parameters()} == {"cpu"}

    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_buffers_of_both_sides_fit(self, precision: str) -> None:
        config = actor(precision)
        theirs = FlatWeights.adopt(policy_of(config).to({"fp32": torch.float32, "bf16": torch.bfloat16}[precision]))
        mine = trained(policy_of(config), config, 1e-3)
        arrive(mine, theirs)
        for name, weight in mine.policy.state_dict().items():
            assert torch.equal(theirs.views[name], weight.to(theirs.views[name].dtype)), name


def arrive(state: TrainingState, into: FlatWeights) -> None:
    """Load the weights that a state sends into others, which must have their names, shapes and types."""
    first, *others = piece_messages(state.sent_weights(), None)
    assert isinstance(first, FirstPiece)
    into.load(first, iter(cast("list[Tensor]", others)))


def distance(precision: str, steps: int = 100, lr: float = 5e-6) -> float:
    """Return how far weights move by imitation of one batch, in the 2-norm."""
    config = actor(precision)
    policy = policy_of(config)
    before = copy.deepcopy(policy)
    state = trained(policy, config, lr)
    generator = torch.Generator().manual_seed(1)
    inputs = {"states": torch.randn(32, 6, generator=generator)}
    actions = torch.randn(32, 1, 4, generator=generator)
    for _ in range(steps):
        state.optimizer.zero_grad()
        with computing(config, CPU):
            loss = -policy(inputs, actions).logprobs.float().mean()
        loss.backward()
        state.optimizer.step()
    moved = [
        (mine.detach().double() - old.detach().double()).pow(2).sum()
        for mine, old in zip(policy.parameters(), before.parameters(), strict=True)
    ]
    return float(torch.stack(moved).sum().sqrt())


def test_bf16_moves_weights_as_far_as_fp32() -> None:
    ratio = distance("bf16") / distance("fp32")
    assert ratio >= 0.98


def test_weights_sent_follow_those_trained() -> None:
    config = actor("bf16")
    state = trained(policy_of(config), config, 1e-2)
    first = [tensor.clone() for tensor in state.sent_weights().tensors()]
    with torch.no_grad():
        for weight in state.policy.parameters():
            weight += 1
    assert all((new != old).any() for new, old in zip(state.sent_weights().tensors(), first, strict=True))
    state.offload()
    assert {weight.dtype for weight in state.policy.parameters()} == {torch.float32}


@pytest.mark.parametrize("model_type", ["pi0", "openvla"])
def test_policies_of_pictures_are_trained_in_fp32(model_type: str) -> None:
    pytest.importorskip("transformers", reason="the extra `language` is not installed")
    options = {"pi0": {"num_layers": 1, "max_prompt_tokens": 7, "steps": 2}}.get(model_type, {})
    config = actor("bf16", model_type=model_type, hidden_dim=64, num_action_chunks=2, options=options)
    policy = policy_of(config, FrankaVisionEnv(EnvSettings(num_envs=1)).spec)
    theirs = FlatWeights.adopt(copy.deepcopy(policy).to(torch.bfloat16))
    state = trained(policy, config, 1e-4)
    assert {weight.dtype for weight in policy.parameters()} == {torch.float32}
    arrive(state, theirs)


HOST = torch.device("cpu")


def policy_and_samples() -> tuple[BasePolicy, Inputs, Tensor]:
    """Return a policy, and observations and actions of 16 environments."""
    torch.manual_seed(0)
    env = make_env("franka_kin", EnvSettings(num_envs=16, task="reach"))
    policy = make_model(EmbodiedModelConfig(hidden_dim=16), env.spec)
    inputs = policy.prepare(env.reset())
    return policy, inputs, policy.act(inputs).actions


def gradients(policy: BasePolicy, inputs: Inputs, actions: Tensor) -> dict[str, Tensor]:
    policy.zero_grad()
    result = policy(inputs, actions)
    assert result.values is not None
    (result.logprobs.mean() + result.values.mean() + policy.imitation_losses(inputs, actions).mean() ** 2).backward()
    return {name: weight.grad.clone() for name, weight in policy.named_parameters() if weight.grad is not None}


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.skipif(missing_compiler(HOST) is not None, reason="there is no C++ compiler")
def test_compiled_passes_have_the_same_gradients() -> None:
    policy, inputs, actions = policy_and_samples()
    expected, names = gradients(policy, inputs, actions), list(policy.state_dict())
    compile_training(policy, ("imitation_losses",), HOST)
    torch.testing.assert_close(gradients(policy, inputs, actions), expected)
    # The last micro batch of a share may be smaller.
    fewer = {name: item[:5] for name, item in inputs.items()}
    assert gradients(policy, fewer, actions[:5]).keys() == expected.keys()
    assert list(policy.state_dict()) == names


def test_a_machine_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, _, _ = policy_and_samples()
    monkeypatch.setenv("CXX", "nosuch++")
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler \(nosuch\+\+\)") as raised:
        compile_training(policy, (), HOST)
    assert "apt install g++" in (raised.value.help or "")


def test_a_gpu_needs_triton_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("recipes.embodied.workers.actor_base.find_spec", lambda name: None)
    assert missing_compiler(HOST) is None
    missing = missing_compiler(torch.device("cuda"))
    assert "triton" in known(missing)[0]


def train(seed: int, **options: Any) -> Outcome:
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return run(arguments([*words, "--stop"]), seed)


def test_ppo_learns_to_reach() -> None:
    result = train(0, task="reach", steps=30, every=5, eval_envs=64)
    assert result.reached is not None
    assert result.success >= 0.9


def test_a_run_is_the_same_again() -> None:
    first, again = (train(3, task="reach", steps=2, every=1, target_return=99) for _ in range(2))
    assert first.mean_return == again.mean_return


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"adv_type": "grpo", "lr": 3e-4}], ids=["ppo", "grpo"])
def test_picking_is_learned(seed: int, options: dict[str, Any]) -> None:
    result = train(seed, steps=300, **options)
    assert result.reached is not None
