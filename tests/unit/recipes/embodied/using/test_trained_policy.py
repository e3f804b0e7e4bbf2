"""Trained policies apart from their runs: loaded in Python, and exported in other formats."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.normalization import Normalization, Statistics
from recipes.embodied.models.policy_folder import read_description, write_description
from recipes.embodied.models.registry import make_model
from recipes.embodied.using.exporting import export
from recipes.embodied.using.trained_policy import load
from recipes.training.weights import training_state
from rlinf_core import CheckpointError, ConfigError, RLinfError, load_policy

STATES = EnvSpec(5, 3)
CHOICES = EnvSpec(5, 1, num_choices=4)
IMAGES = EnvSpec(2, 3, cameras={"main": (40, 40, 3), "wrist": (36, 48, 3)})
WORDS = EnvSpec(2, 3, cameras={"main": (16, 16, 3)}, has_instructions=True)


def config_of(model: dict[str, Any]) -> EmbodiedConfig:
    place = {"actor,rollout,env": {"node_group": "node", "placement": 0}}
    cluster = {"num_nodes": 1, "component_placement": place}
    return EmbodiedConfig.model_validate({"recipe": "embodied", "cluster": cluster, "actor": {"model": model}})


def normalization(spec: EnvSpec, spread: float = 0.4) -> Normalization:
    random = np.random.default_rng(1)
    states = Statistics.of(random.normal(2, 3, (50, spec.state_size)))
    actions = None if spec.num_choices else Statistics.of(random.normal(0.1, spread, (50, spec.action_size)))
    return Normalization("mean_std", states, actions)


def trained(folder: Path, spec: EnvSpec, spread: float = 0.4, **model: Any) -> EmbodiedConfig:
    """Write a checkpoint as actors do, with weights and statistics that are not those of a fresh policy."""
    config = config_of({"hidden_dim": 32, **model})
    torch.manual_seed(1)
    policy = make_model(config.actor.model, spec)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    policy.normalization = normalization(spec, spread)
    training_state.save(folder, policy, torch.optim.AdamW(policy.parameters()), 1)
    write_description(folder, config.actor.model, spec, policy.normalization)
    policy.normalization.save(folder)
    return config


def observations(spec: EnvSpec, count: int = 5) -> dict[str, Any]:
    random = np.random.default_rng(2)
    result: dict[str, Any] = {}
    for name, (shape, kind) in spec.observations.items():
        if kind == "U":
            result[name] = np.array([f"touch the {color} point" for color in ("red", "blue", "red", "blue", "green")])
        elif kind == "uint8":
            result[name] = random.integers(0, 256, (count, *shape), np.uint8)
        else:
            result[name] = random.normal(size=(count, *shape))
    return result


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """The place of a checkpoint."""
    return tmp_path / "global_step_1"


def edit(file: Path, change: Callable[[Any], None]) -> None:
    about = json.loads(file.read_text())
    change(about)
    file.write_text(json.dumps(about))


KINDS = [
    pytest.param(STATES, {"num_action_chunks": 2}, id="mlp"),
    pytest.param(CHOICES, {}, id="choices"),
    pytest.param(IMAGES, {"model_type": "cnn_policy"}, id="cnn"),
    pytest.param(STATES, {"model_type": "flow_policy", "num_action_chunks": 2}, id="flow"),
    pytest.param(IMAGES, {"model_type": "flow_policy", "options": {"steps": 3}}, id="flow-images"),
]


FORMATS = {"safetensors": 0, "torchscript": 1e-5, "onnx": 1e-4}


def acted(kind: str, folder: Path, exported: dict[str, Any], inputs: dict[str, Any]) -> Any:
    """Return the actions of what was exported in a format."""
    if kind == "safetensors":
        return load_policy(folder).act(inputs)
    if kind == "torchscript":
        graph: Any = torch.jit.load(str(folder / "policy.pt"))
        tensors = [torch.as_tensor(inputs[name]) for name in exported["inputs"]]
        return graph(*(tensor.float() if tensor.is_floating_point() else tensor for tensor in tensors)).numpy()
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / "policy.onnx"), providers=["CPUExecutionProvider"])
    assert [item.name for item in session.get_inputs()] == list(exported["inputs"])
    feed = {name: np.asarray(inputs[name], item["dtype"]) for name, item in exported["inputs"].items()}
    return session.run(["actions"], feed)[0]


@pytest.mark.parametrize(
    ("kind", "spec", "model"),
    [
        pytest.param(
            kind,
            *item.values,
            id=f"{kind}-{item.id}",
            marks=[pytest.mark.nightly] if kind == "onnx" and item is not KINDS[0] else [],
        )
        for kind in FORMATS
        for item in KINDS
    ],
)
def test_what_is_exported_acts_as_the_policy(
    step: Path, tmp_path: Path, kind: str, spec: EnvSpec, model: dict[str, Any]
) -> None:
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
    config, inputs = trained(step, spec, **model), observations(spec)
    exported = export(config, step, tmp_path / "out", kind)
    assert kind == "torchscript" or exported["difference"] <= FORMATS[kind]
    assert kind != "torchscript" or exported["files"] == ["policy.json", "policy.pt"]
    actions, wanted = acted(kind, tmp_path / "out", exported, inputs), load(step, config).act(inputs)
    assert actions.shape == wanted.shape
    np.testing.assert_allclose(actions, wanted, rtol=0, atol=FORMATS[kind])


@pytest.mark.parametrize("kind", FORMATS)
def test_exports_clip_and_scale_as_environments(kind: str, step: Path, tmp_path: Path) -> None:
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
    spec = EnvSpec(5, 3, low=(-2, None, 0), high=(2, None, 5))
    config = trained(step, spec, spread=40)
    inputs = {"states": 50 * observations(spec)["states"].astype(np.float32)}
    exported = export(config, step, tmp_path / "out", kind)
    actions = acted(kind, tmp_path / "out", exported, inputs)
    bounded = actions[..., [0, 2]]
    assert np.abs(bounded).max() == 1
    assert np.abs(actions[..., 1]).max() > 1
    native = read_description(tmp_path / "out")[1].native(actions)
    np.testing.assert_allclose(native[..., 0], 2 * actions[..., 0])
    np.testing.assert_allclose(native[..., 1], actions[..., 1])
    np.testing.assert_allclose(native[..., 2], 2.5 * (actions[..., 2] + 1))


def test_a_vision_language_policy_has_no_graph(step: Path, tmp_path: Path) -> None:
    config = trained(step, WORDS, model_type="openvla")
    for kind in ("torchscript", "onnx"):
        with pytest.raises(ConfigError, match="`OpenVlaPolicy` cannot be exported as a tensor graph"):
            export(config, step, tmp_path / kind, kind)
        assert not (tmp_path / kind).exists()
    export(config, step, tmp_path / "safe", "safetensors")
    inputs = observations(WORDS)
    wanted = load(step, config).act(inputs)
    assert np.array_equal(load_policy(tmp_path / "safe").act(inputs), wanted)


def test_an_observation_is_told_by_name(step: Path) -> None:
    config = trained(step, STATES)
    policy = load(step, config)
    with pytest.raises(ConfigError, match="`states` is missing"):
        policy.act({"state": np.zeros((1, 5))})
    with pytest.raises(ConfigError, match=r"`states` is float32 \[1, 4\]"):
        policy.act({"states": np.zeros((1, 4))})
    for wrong, said in ((np.full((1, 5), np.nan), "float32 .1, 5., and not finite"), (np.full((1, 5), "1"), "<U1")):
        with pytest.raises(ConfigError, match=f"`states` is {said}"):
            policy.act({"states": wrong})


def test_pictures_and_texts_are_as_in_training(step: Path) -> None:
    policy, right = load(step, trained(step, WORDS)), observations(WORDS)
    for wrong in ({"images.main": right["images.main"].astype(np.uint16)}, {"instructions": "touch the red point"}):
        with pytest.raises(ConfigError, match=f"`{next(iter(wrong))}` is (uint16|<U19)"):
            policy.act({**right, **wrong})


def test_a_policy_without_its_statistics_is_refused(step: Path) -> None:
    config, file = trained(step, STATES), step / "normalization.json"
    file.unlink()
    with pytest.raises(ConfigError, match="statistics are missing"):
        load(step, config)
    normalization(EnvSpec(5, 3)).save(step)
    load(step, config)
    edit(file, lambda about: about["states"]["mean"].insert(0, about["states"]["mean"].pop(0) + 1))
    with pytest.raises(ConfigError, match="not match the policy"):
        load(step, config)


def test_other_weights_are_refused(step: Path, tmp_path: Path) -> None:
    trained(step, STATES)
    with pytest.raises(CheckpointError, match=r"has `hidden_dim: 32`, but `actor\.model\.hidden_dim` is 64"):
        load(step, config_of({"hidden_dim": 64}))
    with pytest.raises(ConfigError, match="no policy in the folder"):
        load_policy(tmp_path)


def test_nothing_is_overwritten(step: Path, tmp_path: Path) -> None:
    config = trained(step, STATES)
    with pytest.raises(RLinfError, match="exists"):
        export(config, step, tmp_path, "safetensors")
    with pytest.raises(ConfigError, match="unknown format `pickle`"):
        export(config, step, tmp_path / "a", "pickle")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": "x"}, '`format` is "x", and this rlinf reads 1'),
        ({"model": None}, "`model` is empty; expected a mapping"),
        ({"observations_and_actions": "x"}, "`observations_and_actions`: expected a mapping, found text"),
        ({"state_size": "5"}, "`observations_and_actions.state_size`: expected an integer, found text"),
        ({"cameras": {"main": [16, 16]}}, "`observations_and_actions.cameras.main.2`"),
        ({"cameras": None}, "`observations_and_actions.cameras` is empty"),
        ({"has_instructions": 1}, "`observations_and_actions.has_instructions`: expected true or false"),
        ({"low": [None, "a"]}, "`observations_and_actions.low.1`: expected a number, found text"),
        ({"reach": 3}, "`observations_and_actions.reach` is unknown"),
    ],
)
def test_description_with_a_wrong_value_is_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    write_description(tmp_path, config_of({}).actor.model, WORDS, Normalization())
    file = tmp_path / "policy.json"
    about = json.loads(file.read_text())
    assert read_description(tmp_path)[1] == WORDS
    sizes = about["observations_and_actions"]
    about |= {name: value for name, value in change.items() if name in about}
    if isinstance(about["observations_and_actions"], dict):
        about["observations_and_actions"] = {**sizes, **{k: v for k, v in change.items() if k not in about}}
    file.write_text(json.dumps(about))
    with pytest.raises(ConfigError, match="is invalid") as caught:
        read_description(tmp_path)
    assert why in str(caught.value.why)


def test_keys_of_other_kinds_are_warnings_unknown_ones_refused(step: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(step, STATES)
    edit(step / "policy.json", lambda about: about["model"].update(lora={"rank": 16}, is_lora=False))
    assert load(step, None).spec == STATES
    (message,) = [record.getMessage() for record in caplog.records if "policy.json" in record.getMessage()]
    assert message.endswith("`lora` is left out: it has no effect with `model_type: mlp_policy`")
    edit(step / "policy.json", lambda about: about["model"].update(width=16))
    with pytest.raises(ConfigError, match=r"policy\.json` is invalid") as caught:
        load(step, None)
    assert caught.value.why == "`model.width` is unknown"


def test_missing_packages_of_a_format_come_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("onnx", "onnxscript"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RLinfError, match=r"packages that this Python lacks: onnx, onnxscript") as raised:
        export(config_of({}), tmp_path / "no checkpoint", tmp_path / "onnx", "onnx")
    assert "onnxruntime" in str(raised.value.help)
    assert "rlinf-cli[onnx]" in str(raised.value.help)
