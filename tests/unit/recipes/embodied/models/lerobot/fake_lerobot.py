"""A stand-in for lerobot: the interface that its policies have in common, with one small policy of two kinds.

Its names and signatures are those of lerobot 0.6; tests/integration/recipes/policies/test_policies.py runs the
real one.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

STATE, ACTION = "observation.state", "action"
NORMALIZER = "policy_preprocessor_step_3_normalizer_processor.safetensors"


@dataclass
class FakeConfig:
    """A configuration with lerobot's names."""

    kinds: ClassVar[dict[str, Any]] = {}
    type: ClassVar[str] = ""

    n_obs_steps: int = 1
    chunk_size: int = 6
    n_action_steps: int = 6
    dim_model: int = 8
    device: str = "cpu"
    temporal_ensemble_coeff: float | None = None
    input_features: dict[str, Any] = field(default_factory=dict[str, Any])
    output_features: dict[str, Any] = field(default_factory=dict[str, Any])
    normalization_mapping: dict[str, Any] = field(
        default_factory=lambda: {"STATE": "MEAN_STD", "ACTION": "MIN_MAX", "VISUAL": "MEAN_STD"}
    )

    def __post_init__(self) -> None:
        if self.n_action_steps > self.chunk_size:
            raise ValueError(f"The chunk size is the upper bound. Got {self.n_action_steps} for `n_action_steps`.")
        modes = self.normalization_mapping.items()
        self.normalization_mapping = {kind: SimpleNamespace(value=getattr(mode, "value", mode)) for kind, mode in modes}
        for features in (self.input_features, self.output_features):
            for key, about in features.items():
                features[key] = about if isinstance(about, SimpleNamespace) else SimpleNamespace(**about)

    @property
    def action_delta_indices(self) -> list[int]:
        return list(range(1 - self.n_obs_steps, 1 - self.n_obs_steps + self.chunk_size))

    @property
    def observation_delta_indices(self) -> list[int] | None:
        return None if self.n_obs_steps == 1 else list(range(1 - self.n_obs_steps, 1))

    @property
    def image_features(self) -> dict[str, Any]:
        return {key: about for key, about in self.input_features.items() if about.type == "VISUAL"}

    @property
    def robot_state_feature(self) -> Any:
        return self.input_features.get(STATE)

    @property
    def env_state_feature(self) -> Any:
        return self.input_features.get("observation.environment_state")

    @property
    def action_feature(self) -> Any:
        return self.output_features.get(ACTION)

    def validate_features(self) -> None:
        if not self.image_features and self.env_state_feature is None:
            raise ValueError("You must provide at least one image or the environment state among the inputs.")

    def _save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({"type": self.type, **encode(self)}))

    @classmethod
    def get_choice_class(cls, kind: str) -> Any:
        return cls.kinds[kind]

    @classmethod
    def from_pretrained(cls, folder: str, *, local_files_only: bool) -> Any:
        assert local_files_only
        about = json.loads((Path(folder) / "config.json").read_text())
        return decode(cls.kinds[about.pop("type")], about)


class Act(FakeConfig):
    type = "act"


class Drawn(FakeConfig):
    type = "drawn"


@dataclass
class Diffusion(FakeConfig):
    type: ClassVar[str] = "diffusion"
    noise_scheduler_type: str = "DDPM"


FakeConfig.kinds = {"act": Act, "drawn": Drawn, "diffusion": Diffusion}


def encode(config: FakeConfig) -> dict[str, Any]:
    return json.loads(json.dumps({field.name: getattr(config, field.name) for field in fields(config)}, default=vars))


def decode(kind: Any, about: dict[str, Any]) -> Any:
    unknown = about.keys() - {field.name for field in fields(kind)}
    if unknown:
        raise ValueError(f"The fields `{sorted(unknown)[0]}` are not valid for {kind.__name__}")
    modes = about.get("normalization_mapping")
    if modes is not None:
        about = {
            **about,
            "normalization_mapping": {k: getattr(m, "get", lambda _, m=m: m)("value") for k, m in modes.items()},
        }
    return kind(**about)


class FakeModel(nn.Module):
    """States to a chunk, by an encoder whose output is [L, n, W]."""

    def __init__(self, config: FakeConfig) -> None:
        super().__init__()
        self.shape = (config.chunk_size, config.action_feature.shape[0])
        self.encoder = nn.Linear(config.n_obs_steps * config.robot_state_feature.shape[0], config.dim_model)
        self.head = nn.Linear(config.dim_model, self.shape[0] * self.shape[1])

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, None]:
        encoded = self.encoder(batch[STATE].flatten(1)[None])
        return self.head(encoded.mean(dim=0)).view(-1, *self.shape), None


class FakePolicy(nn.Module):
    """A policy with lerobot's interface; but for `act` it adds noise to what it selects, `diffusion` also what is
    given.
    """

    def __init__(self, config: FakeConfig) -> None:
        super().__init__()
        self.config, self.model = config, FakeModel(config)
        self.reset()

    @classmethod
    def from_pretrained(cls, folder: str, *, config: FakeConfig, local_files_only: bool, strict: bool) -> Any:
        made = cls(config)
        made.load_state_dict(load_file(Path(folder) / "model.safetensors"), strict=strict)
        return made.eval()

    def save_pretrained(self, folder: Path) -> None:
        self.config._save_pretrained(folder)
        save_file(self.state_dict(), folder / "model.safetensors")

    def reset(self) -> None:
        steps = self.config.n_obs_steps
        self._queues: dict[str, deque[Tensor]] = {STATE: deque(maxlen=steps), ACTION: deque()}

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        away = (self.model(batch)[0] - batch[ACTION]).abs() * ~batch["action_is_pad"][..., None]
        return away.mean(), {}

    @torch.no_grad()
    def select_action(self, batch: dict[str, Tensor], noise: Tensor | None = None) -> Tensor:
        seen, chosen = self._queues[STATE], self._queues[ACTION]
        seen.extend([batch[STATE]] * (1 if seen else self.config.n_obs_steps))
        if not chosen:
            chunk = self.model({STATE: torch.stack(list(seen), dim=1)})[0]
            drawn = torch.randn_like(chunk) if self.config.type != "act" else torch.zeros(())
            first = self.config.n_obs_steps - 1
            chosen.extend(
                (chunk + (drawn if noise is None else noise))[:, first : first + self.config.n_action_steps].unbind(
                    dim=1
                )
            )
        return chosen.popleft()


class Processor:
    """Normalization of one direction, kept in lerobot's files."""

    steps: ClassVar[list[Any]] = []

    def __init__(self, config: FakeConfig, stats: dict[str, dict[str, Tensor]], *, back: bool) -> None:
        self.config, self.stats, self.back = config, stats, back

    def __call__(self, batch: Any) -> Any:
        if self.back:
            return self._scaled(ACTION, batch)
        return {key: self._scaled(key, value) if isinstance(value, Tensor) else value for key, value in batch.items()}

    def _scaled(self, key: str, values: Tensor) -> Tensor:
        feature = {**self.config.input_features, **self.config.output_features}[key]
        mode, stats = self.config.normalization_mapping.get(feature.type), self.stats.get(key)
        if mode is None or mode.value == "IDENTITY" or stats is None:
            return values
        if mode.value == "MEAN_STD":
            shift, scale, offset = stats["mean"], stats["std"] + 1e-8, 0.0
        else:
            shift, scale, offset = stats["min"], (stats["max"] - stats["min"]) / 2, 1.0
        return (values + offset) * scale + shift if self.back else (values - shift) / scale - offset

    def save_pretrained(self, folder: Path, *, config_filename: str) -> None:
        modes = {kind: mode.value for kind, mode in self.config.normalization_mapping.items()}
        step = {"registry_name": "normalizer_processor", "state_file": NORMALIZER, "config": {"norm_map": modes}}
        (folder / config_filename).write_text(json.dumps({"steps": [step]}))
        if not self.back:
            columns = {f"{key}.{name}": values for key, of in self.stats.items() for name, values in of.items()}
            save_file(columns, folder / NORMALIZER)


def make_pre_post_processors(config: FakeConfig, pretrained_path: str | None = None, **about: Any) -> Any:
    if pretrained_path is None:
        before = after = about["dataset_stats"]
    else:
        before = about["preprocessor_overrides"]["normalizer_processor"]["stats"]
        after = about["postprocessor_overrides"]["unnormalizer_processor"]["stats"]
    return Processor(config, before, back=False), Processor(config, after, back=True)


def get_policy_class(kind: str) -> type[FakePolicy]:
    return FakePolicy


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `import lerobot` and `import draccus` find these for the rest of a test."""
    modules = {
        name: ModuleType(name)
        for name in ("lerobot", "lerobot.policies", "lerobot.configs", "lerobot.configs.policies")
    }
    modules["lerobot.configs.policies"].__dict__["PreTrainedConfig"] = FakeConfig
    factory, draccus = ModuleType("lerobot.policies.factory"), ModuleType("draccus")
    factory.__dict__.update(get_policy_class=get_policy_class, make_pre_post_processors=make_pre_post_processors)
    draccus.__dict__.update(config_type=lambda kind: nullcontext(), encode=encode, decode=decode)
    for name, module in {**modules, "lerobot.policies.factory": factory, "draccus": draccus}.items():
        monkeypatch.setitem(sys.modules, name, module)
