"""Folders of published policies with mistakes by seed: one clear error, or a policy whose actions are numbers.

Damaged numbers of weights are left out: nothing in these formats tells them from others.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_config import policy_model
from recipes.embodied.envs.env_spec import EnvSpec, Observation
from recipes.embodied.models.folder_facts import fault_of_policy
from recipes.embodied.models.policy_folder import save_policy
from recipes.embodied.models.registry import make_model
from recipes.embodied.models.vla.vision_language import built_tokenizer
from rlinf_core import ConfigError
from tests.mistakes import HOSTILE, garbled, mutated
from tests.unit.recipes.embodied.models.openvla import openvla_folder
from tests.unit.recipes.embodied.models.vla import pi_folders

pytest.importorskip("transformers", reason="the extra `language` is not installed")
pytestmark = pytest.mark.security

CAMERA = (32, 32, 3)
SPEC = EnvSpec(10, 3, cameras={"main": CAMERA}, has_instructions=True)
SEEN: Observation = {
    "states": np.linspace(-1, 1, 10, dtype=np.float32)[None],
    "images.main": np.random.default_rng(0).integers(0, 256, (1, *CAMERA), np.uint8),
    "instructions": np.array(["push the block"]),
}


def built(folder: Path, **model: Any) -> None:
    """Save a policy that was built here, as a run does."""
    config, spec = config_of(None, **model)
    save_policy(make_model(config, spec), config, spec, folder)


def pi0(folder: Path) -> None:
    """Save a pi0 as transformers does, with a processor that has statistics."""
    config, spec = config_of(None, model_type="pi0", hidden_dim=32, options={"num_layers": 1, "max_prompt_tokens": 9})
    policy: Any = make_model(config, spec)
    policy.base.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    about = {"state_mean": [0.5] * 10, "state_std": [2.0] * 10, "actions_mean": [0.5] * 3, "actions_std": [2.0] * 3}
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "PI0Processor", **about}))


def with_tokenizer(write: Callable[[Path], Any]) -> Callable[[Path], None]:
    def whole(folder: Path) -> None:
        folder.mkdir()
        write(folder)
        built_tokenizer().save_pretrained(str(folder))

    return whole


# By case: `model_type`, and what writes the folder.
CASES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "pi05_openpi": ("pi05", with_tokenizer(pi_folders.write_openpi)),
    "pi05_lerobot": ("pi05", with_tokenizer(pi_folders.write_lerobot)),
    "pi0_transformers": ("pi0", pi0),
    "openvla": ("openvla", openvla_folder.write),
    "openvla_oft": ("openvla_oft", openvla_folder.write),
    "pi0_saved": ("pi0", lambda folder: built(folder, model_type="pi0", hidden_dim=32, options={"num_layers": 1})),
    "mlp_saved": ("mlp_policy", lambda folder: built(folder, model_type="mlp_policy")),
}


def config_of(folder: Path | None, model_type: str, **model: Any) -> tuple[EmbodiedModelConfig, EnvSpec]:
    """Return a policy's section, and the environment that it fits."""
    path = None if folder is None else str(folder)
    fields = {"model_type": model_type, "model_path": path, "num_action_chunks": 2, **model}
    spec = replace(SPEC, state_size=0, action_size=4) if "openvla" in model_type else SPEC
    if model_type == "mlp_policy":
        spec = replace(spec, cameras={}, has_instructions=False)
    return policy_model(fields), spec


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    home = tmp_path_factory.mktemp("published")

    def folder(case: str) -> Path:
        if not (home / case).exists():
            CASES[case][1](home / case)
        return home / case

    return folder


def with_mistakes(draw: random.Random, file: Path) -> bytes | None:
    """Return the content of a file with mistakes; None: the file is missing."""
    content = file.read_bytes()
    if draw.random() < 0.05:
        return None
    if file.suffix == ".json":
        kinds = (json.dumps(mutated(draw, json.loads(content))).encode(), garbled(draw, content), draw.choice(HOSTILE))
        return draw.choices(kinds, (8, 1, 1))[0]
    header = 8 + int.from_bytes(content[:8], "little")
    kinds = (
        garbled(draw, content[:header]) + content[header:],
        content[: draw.randrange(len(content))],
    )
    return draw.choice(kinds)


def expect_judged(case: str, folder: Path, seed: int, what: str) -> bool:
    """Check that a folder is refused clearly, or acts; return whether it is refused."""
    model_type = CASES[case][0]
    config, spec = config_of(folder, model_type)
    if fault_of_policy(model_type, str(folder)) is not None:
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            policy: Any = make_model(config, spec)
            actions = policy.to_env(policy.act(policy.prepare(SEEN), greedy=True).actions)
    except ConfigError as error:
        message = str(error)
    else:
        message = ""
        assert np.isfinite(actions).all(), (case, seed, what)
    assert len(message) < 3000, (case, seed, what, message[:300])
    return bool(message)


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize(
    ("first", "mistakes"), [(0, 12), pytest.param(12, 400, marks=(pytest.mark.nightly, pytest.mark.timeout(900)))]
)
def test_published_folders_with_mistakes(
    folders: Callable[[str], Path], tmp_path: Path, case: str, first: int, mistakes: int
) -> None:
    whole = folders(case)
    assert not expect_judged(case, whole, -1, "whole"), "a whole folder is refused"
    files = sorted(file.relative_to(whole) for file in whole.rglob("*") if file.suffix in (".json", ".safetensors"))
    refused = 0
    for seed in range(first, first + mistakes):
        draw = random.Random(seed)
        name = draw.choice(files)
        content = with_mistakes(draw, whole / name)
        copy = shutil.copytree(whole, tmp_path / str(seed), copy_function=lambda a, b: Path(b).symlink_to(a))
        (copy / name).unlink()
        if content is not None:
            (copy / name).write_bytes(content)
        refused += expect_judged(case, copy, seed, f"{name}: {content if content is None else content[:3000]!r}")
    assert 0 < refused < mistakes


@pytest.mark.parametrize(
    ("case", "name", "change", "reason"),
    [
        ("pi05_openpi", "assets/lab/arm/norm_stats.json", {"norm_stats": {"actions": {"q01": [4.0] * 3}}}, "above the"),
        ("pi05_openpi", "assets/lab/arm/norm_stats.json", {"norm_stats": {"actions": {"q99": [1e300] * 3}}}, "1e+300"),
        ("pi05_openpi", "config.json", {"action_horizon": 2**31}, "`action_horizon`"),
        ("pi05_lerobot", "config.json", {"num_inference_steps": "10"}, "`num_inference_steps`"),
        ("pi0_transformers", "processor_config.json", {"state_std": [-1.0] * 10}, "a standard deviation is -1.0"),
        ("pi0_transformers", "config.json", {"vlm_config": {"output_hidden_states": "0"}}, "`output_hidden_states`"),
        ("pi0_saved", "backbone/config.json", {"dit_config": {"num_hidden_layers": 2**31}}, "`num_hidden_layers`"),
        ("pi0_transformers", "tokenizer_config.json", {"bos_token": "<begin>"}, "the tokenizer is of another model"),
        ("pi0_transformers", "tokenizer_config.json", {"pad_token": None}, "`pad_token`"),
        ("openvla", "tokenizer_config.json", {"bos_token": None}, "`bos_token`"),
        ("openvla", "config.json", {"text_config": {"num_attention_heads": 0.5}}, "num_attention_heads"),
        ("pi0_saved", "backbone/preprocessor_config.json", {"image_std": [0.0, 0.5, 0.5]}, "`image_std`"),
    ],
)
def test_what_was_wrong_is_named(
    folders: Callable[[str], Path], tmp_path: Path, case: str, name: str, change: Any, reason: str
) -> None:
    copy = Path(shutil.copytree(folders(case), tmp_path / "copy"))
    about = json.loads((copy / name).read_text())
    (copy / name).write_text(json.dumps(merged(about, change)))
    config, spec = config_of(copy, CASES[case][0])
    with pytest.raises(ConfigError, match=re.escape(reason)):
        make_model(config, spec).prepare(SEEN)


def merged(settings: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Return settings of which some are changed, those within others included."""
    own: dict[str, Any] = dict(settings)
    for name, value in change.items():
        own[name] = merged(own[name], value) if isinstance(value, dict) else value
    return own
