"""The page that shows how a trained policy is used elsewhere: its programs run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.normalization import Normalization
from recipes.embodied.models.policy_folder import write_description
from recipes.embodied.models.registry import make_model
from recipes.embodied.using.exporting import export
from recipes.training.state import state_checkpoint
from rlinf_core import load_job

PAGE = Path(__file__).parents[3] / "docs" / "evaluation.md"


def test_the_programs_of_the_page_run(tmp_path: Path) -> None:
    model, spec = EmbodiedModelConfig(), EnvSpec(state_size=21, action_size=8, has_instructions=True)
    policy = make_model(model, spec)
    state_checkpoint.save(tmp_path / "trained", policy, torch.optim.AdamW(policy.parameters()), 1)
    write_description(tmp_path / "trained", model, spec, Normalization())
    config = load_job("laptop").config
    export(config, tmp_path / "trained", tmp_path / "exported", "safetensors")  # pyright: ignore[reportArgumentType]
    export(config, tmp_path / "trained", tmp_path / "script", "torchscript")  # pyright: ignore[reportArgumentType]
    acting, graph = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert "of 16 picked" in printed(acting, tmp_path)
    assert printed(graph, tmp_path).strip() == "(1, 1, 8)"


def printed(program: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"PYTHONPATH": str(PAGE.parents[1]), "OMP_NUM_THREADS": "1", "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
