"""Exports of trained policies: `rlinf export` calls `export`.

    safetensors   the folder that `load_policy` and `actor.model.model_path` read
    torchscript   `policy.pt` for `torch.jit.load`, in Python and C++
    onnx          `policy.onnx` for ONNX runtimes

The last two are one graph from observations to actions as the environment takes them, normalization included.
"""

# torch's exporters are largely untyped.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportPrivateImportUsage=false
# pyright: reportUnknownLambdaType=false, reportMissingTypeStubs=false

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from recipes.embodied.config import PolicyJob
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.envs.observation_keys import INSTRUCTIONS
from recipes.embodied.models.base_policy import BasePolicy
from recipes.embodied.models.policy_folder import save_policy, write_description
from recipes.embodied.using.trained_policy import TrainedPolicy, load
from rlinf_core import ConfigError, RLinfError
from rlinf_core.process.requirements import install_command, missing_modules

FORMATS: Final = ("safetensors", "torchscript", "onnx")
_ONNX: Final = ("onnx", "onnxscript")
_ACTIONS: Final = "actions"
# The largest difference between actions of an export and of the policy.
_TOLERANCE: Final = 1e-4
_EXAMPLES: Final = 3


def export(config: PolicyJob, checkpoint: Path, folder: Path, kind: str) -> dict[str, Any]:
    """Write the policy of a checkpoint into a new folder.

    Args:
        config: the configuration of the run.
        checkpoint: a folder `global_step_N`.
        folder: the new folder, which must not exist.
        kind: one of `FORMATS`.

    Returns:
        `folder`, `format`, `files`, `inputs` and `outputs` (name, type and shape), and `difference`, the largest
        between actions of the policy and of the export; None if not measured.

    Raises:
        ConfigError: the format is unknown, or the policy cannot be expressed in it.
        RLinfError: the folder exists, a package is missing, or the export's actions differ.
    """
    if kind not in FORMATS:
        raise ConfigError(f"unknown format `{kind}`", help=f"known: {', '.join(FORMATS)}")
    if folder.exists():
        raise RLinfError("the export folder already exists", where=str(folder), help="name another with `-o`")
    missing = missing_modules(_ONNX) if kind == "onnx" else []
    if missing:
        raise RLinfError(
            f"`--format onnx` needs packages that this Python lacks: {', '.join(missing)}",
            help=f"run `{install_command(*_ONNX, 'onnxruntime')}`, or install `rlinf-cli[onnx]`",
        )
    trained = load(checkpoint, config)
    spec, policy = trained.spec, trained.module
    names = [name for name in trained.observations if kind == "safetensors" or name != INSTRUCTIONS]
    if kind == "safetensors":
        save_policy(policy, config.actor.model, spec, folder)
        difference = _difference(
            trained, lambda observations: load(folder, None).act(observations), list(trained.observations)
        )
    else:
        graph = _Graph(policy, names, spec).requires_grad_(False)
        example = tuple(torch.from_numpy(observation) for observation in _observations(trained, names).values())
        graph(*example)  # fails for a policy that needs more than tensors, before anything is written
        difference = _write_graph(trained, graph, names, example, folder, kind)
        write_description(folder, config.actor.model, spec, policy.normalization)
    observed = {name: (shape, dtype) for name, (shape, dtype) in trained.observations.items() if name in names}
    return {
        "folder": str(folder),
        "format": kind,
        "files": sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()),
        "inputs": {
            name: {"dtype": "text" if dtype == "U" else dtype, "shape": ["n", *shape]}
            for name, (shape, dtype) in observed.items()
        },
        "outputs": {
            _ACTIONS: {
                "dtype": spec.action_dtype,
                "shape": ["n", config.actor.model.num_action_chunks, spec.action_size],
            }
        },
        "difference": difference,
    }


class _Graph(nn.Module):
    """A policy as a function from its observations, in order, to actions."""

    def __init__(self, policy: BasePolicy, names: Sequence[str], spec: EnvSpec) -> None:
        super().__init__()
        self.policy, self.names = policy, list(names)
        # The bound of each dimension; None: discrete actions, which have none.
        self.bound: Tensor | None = None
        if spec.num_choices is None:
            self.bound = torch.from_numpy(np.where(spec.bounded, 1.0, np.finfo(np.float32).max).astype(np.float32))

    def forward(self, *observations: Tensor) -> Tensor:
        """Return the likeliest actions, [n, C, A], clipped as the environment clips them."""
        actions = self.policy.greedy(dict(zip(self.names, observations, strict=True)))
        return actions if self.bound is None else torch.minimum(torch.maximum(actions, -self.bound), self.bound)


def _write_graph(
    trained: TrainedPolicy,
    graph: _Graph,
    names: list[str],
    example: tuple[Tensor, ...],
    folder: Path,
    kind: str,
) -> float | None:
    """Write a graph, and return the distance of its actions from the policy's; None without a runtime."""
    with torch.no_grad(), warnings.catch_warnings():
        # Exporters warn of their own deprecation and of optional packages.
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        if kind == "torchscript":
            traced: Any = torch.jit.trace(graph, example, check_trace=False)
            folder.mkdir(parents=True)
            traced.save(str(folder / "policy.pt"))
            loaded = cast("Any", torch.jit.load(str(folder / "policy.pt")))
            return _difference(
                trained,
                lambda observations: loaded(*(torch.from_numpy(observations[name]) for name in names)).numpy(),
                names,
            )
        folder.mkdir(parents=True)
        _write_onnx(graph, names, example, folder / "policy.onnx")
    if missing_modules(["onnxruntime"]):
        return None
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / "policy.onnx"), providers=["CPUExecutionProvider"])
    return _difference(
        trained, lambda observations: session.run([_ACTIONS], {name: observations[name] for name in names})[0], names
    )


def _write_onnx(graph: _Graph, names: list[str], example: tuple[Tensor, ...], file: Path) -> None:
    from torch.export import Dim

    count = Dim("n", min=1)
    torch.onnx.export(
        graph,
        example,
        str(file),
        input_names=names,
        output_names=[_ACTIONS],
        dynamic_shapes=(tuple({0: count} for _ in names),),
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def _observations(trained: TrainedPolicy, names: Sequence[str], count: int = _EXAMPLES) -> dict[str, Any]:
    random = np.random.default_rng(0)
    observations: dict[str, Any] = {}
    for name, (shape, dtype) in trained.observations.items():
        if name not in names:
            continue
        if dtype == "U":
            observations[name] = np.array(["pick up the block"] * count)
        elif dtype == "uint8":
            observations[name] = random.integers(0, 256, (count, *shape), np.uint8)
        else:
            observations[name] = random.normal(size=(count, *shape)).astype(np.float32)
    return observations


def _difference(trained: TrainedPolicy, act: Callable[[dict[str, Any]], Any], names: Sequence[str]) -> float:
    """Return the largest difference between actions of a policy and of its export, for a batch of another size.

    Raises:
        RLinfError: the difference is too large.
    """
    observations = _observations(trained, list(trained.observations), 2 * _EXAMPLES + 1)
    away = np.abs(np.asarray(act({name: observations[name] for name in names})) - trained.act(observations)).max()
    if not away <= _TOLERANCE:
        raise RLinfError(
            f"actions of the export differ from the policy's by {away:.3g}",
            why="the format cannot express this policy",
            help="use `--format safetensors`",
        )
    return float(away)
