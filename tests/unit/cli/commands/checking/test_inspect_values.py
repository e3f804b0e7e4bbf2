"""`rlinf inspect config`, `rlinf inspect env` and `rlinf inspect memory`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from ruamel.yaml import YAML

from recipes.demonstrations.lerobot.writer import DatasetWriter
from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.rules.env_rules import sizes_of
from recipes.embodied.using.recording import features_of
from rlinf_cli.memory import NodeMemory, memory_record, memory_text, node_memory, node_needs
from rlinf_core.config.shipped import shipped_configs
from rlinf_core.job.load import load_job
from rlinf_core.job.recipe import ACCELERATOR_LIBRARIES, ProcessForecast
from rlinf_core.placement.strategy import Placement
from rlinf_core.process.proc import Peak
from tests.unit.cli.typed import Cli, text_file

Contract = Callable[[str, str], Any]


def origin(out: str, key: str) -> str:
    (line,) = [line for line in out.splitlines() if line.strip().startswith((f"{key}:", f"- {key}:"))]
    return line.rpartition("  # ")[2]


def test_each_value_with_its_line_its_override_or_default(cli: Cli, mixed: Path) -> None:
    out = cli.out("inspect", "config", mixed, "cluster.head_address=10.0.0.9")
    assert origin(out, "num_nodes") == f"{mixed}:2"
    assert origin(out, "head_address") == "override cluster.head_address=10.0.0.9"
    assert origin(out, "ports") == "default"
    # Null and empty defaults are shown on demand.
    assert "head_address" not in cli("inspect", "config", mixed).out
    assert origin(cli("inspect", "config", mixed, "--all").out, "head_address") == "default"


def test_a_base_shows_as_itself(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("cluster:\n  num_nodes: 2\n")
    (tmp_path / "top.yaml").write_text("extends: base.yaml\ncluster:\n  head_address: 10.0.0.1\n")
    out = cli("inspect", "config", tmp_path / "top.yaml").out
    assert origin(out, "num_nodes") == f"{tmp_path / 'base.yaml'}:2"
    assert origin(out, "head_address") == f"{tmp_path / 'top.yaml'}:3"


def test_secrets_are_masked(cli: Cli, mixed: Path) -> None:
    for form in ("text", "json"):
        ended = cli("inspect", "config", mixed, "--output", form)
        assert "hunter2" not in ended.out + ended.err
        assert "********" in ended.out


def _record(folder: Path, name: str) -> None:
    """Write demonstrations of the environment of a file."""
    config = cast("EmbodiedConfig", load_job(name, environ={}).config)
    facts = sizes_of(config, config.env.eval)
    # Cameras as the file says that the data call them.
    names = {
        f"observation.images.{ours}": f"observation.images.{theirs}" for ours, theirs in config.data.cameras.items()
    }
    features = {names.get(key, key): feature for key, feature in features_of(facts.spec or EnvSpec(2, 1)).items()}
    with DatasetWriter(folder, round(facts.control_hz or 20), features) as writer:
        kinds = {name: np.uint8 if feature.is_camera else feature.dtype for name, feature in features.items()}
        writer.add({name: np.zeros((3, *feature.shape), kinds[name]) for name, feature in features.items()}, "do it")


@pytest.mark.parametrize("name", sorted(shipped_configs()))
@pytest.mark.parametrize("form", [(), ("--all",)])
def test_the_text_is_yaml_of_the_same_job(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: tuple[str, ...]
) -> None:
    """Loaded again it says the same, apart from where it says it comes from."""
    # Demonstrations that a file names are recorded first, in the folder where it is used.
    monkeypatch.chdir(tmp_path)
    shipped = shipped_configs()[name]
    if "demonstrations/" in shipped.read_text():
        named = YAML(typ="safe", pure=True).load(shipped).get("data", {}).get("train_data_paths")
        if str(named).startswith("./demonstrations/"):
            _record(Path(named), name)
    first = cli("inspect", "config", name, *form)
    if first.code:
        pytest.fail(first.err)
    again = text_file(tmp_path / "again.yaml", first.out)
    second = cli("inspect", "config", again, *form)
    assert second.code == 0, second.err

    def data(text: str) -> Any:
        return YAML(typ="safe", pure=True).load(text)

    assert data(second.out) == data(first.out)


def test_json_is_the_contract(cli: Cli, mixed: Path, contract: Contract) -> None:
    data = contract("config", cli("inspect", "config", mixed, "cluster.ssh.port=23", "--json").out)
    assert data["config"]["cluster"]["num_nodes"] == 4
    assert data["config"]["cluster"]["node_groups"][0]["label"] == "a800"
    values = {value.pop("path"): value for value in data["values"]}
    nodes = {"value": 4, "origin": "file", "file": str(mixed), "line": 2, "column": 14}
    assert values["cluster.num_nodes"] == nodes
    assert (values["cluster.ssh.port"]["value"], values["cluster.ssh.port"]["origin"]) == (23, "override")
    assert (values["cluster.ports"]["origin"], values["cluster.ports"]["line"]) == ("default", None)


LOSSLESS = """\
recipe: embodied
cluster:
  num_nodes: 1
  component_placement: {"actor,rollout": {node_group: 007, placement: 0}, env: {node_group: arm, placement: 0}}
  node_groups:
    - {label: 007, node_ranks: 0, env_configs: [{node_ranks: 0, env_vars: [{A: 1.50}, {B: 0x10}, {C: true}]}]}
    - label: arm
      node_ranks: 0
      hardware: {type: Franka, configs: [{node_rank: 0, robot_ip: 10.0.0.1, camera_serials: [0123456789, 81e3]}]}
env: {train: {env_type: "recipes.embodied.envs.franka.franka_kin:FrankaKinEnv", options: {x: .inf, y: 0.50}}}
"""


def test_json_keeps_text_that_looks_like_a_number(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(LOSSLESS)
    paths = ("actor.model.model_path=model", "actor.checkpoint_save_path=~/saved")
    ended = cli("inspect", "config", tmp_path / "job.yaml", *paths, "--json")
    config = json.loads(ended.out, parse_constant=pytest.fail)["config"]
    groups = config["cluster"]["node_groups"]
    assert groups[0]["label"] == "007"
    assert config["cluster"]["component_placement"]["actor"] == {
        "node_group": "007",
        "placement": 0,
        "elastic": False,
    }
    assert groups[0]["env_configs"][0]["env_vars"] == [{"A": "1.50"}, {"B": "0x10"}, {"C": "true"}]
    assert groups[1]["hardware"]["configs"][0]["camera_serials"] == ["0123456789", "81e3"]
    assert config["env"]["train"]["options"] == {"x": ".inf", "y": 0.5}
    # A relative path is shown as the job reads it, as in the text.
    assert config["actor"]["model"]["model_path"] == str(Path("model").absolute())
    assert config["actor"]["checkpoint_save_path"] == str(Path.home() / "saved")


def test_the_interpreter_and_each_variable_with_its_layer(cli: Cli, mixed: Path) -> None:
    out = cli.out("inspect", "env", mixed, "--component", "actor", "--rank", "3")
    lines = out.splitlines()
    assert lines[0].startswith("actor:3 on node 0 (trainer00), ")
    assert lines[3].split() == ["/opt/train/bin/python", "env_configs", "of", "a800,", f"{mixed}:10"]
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[5:]}
    assert rows["NCCL_SOCKET_IFNAME"] == f"eth0 env_configs of a800, {mixed}:12"
    assert rows["WANDB_API_KEY"].startswith("******** env_configs of a800")
    assert rows["PYTHONPATH"] == f"/opt/lib:<node's own> path merge of a800, {mixed}:14"
    assert rows["RANK"] == "3 runtime"
    assert "hunter2" not in out


def test_only_what_the_process_needs_must_be_known(cli: Cli, mixed: Path) -> None:
    """The accelerators of `sim` are unknown, which is no matter for a robot."""
    assert "the node's own  Ray's; with `rlinf up`: the path of rlinf itself\n" in cli.out(
        "inspect", "env", mixed, "-c", "env", "-r", "1"
    )
    err = cli.fails(2, "inspect", "env", mixed, "-c", "sim", "-r", "0")
    suggested = err.partition("`rlinf ")[2].partition("`")[0].split()
    assert suggested[-2:] == ["--assume", "sim=8"]
    assert cli(*suggested).code == 0


TWO_GROUPS = """\
cluster:
  num_nodes: 1
  component_placement: {env: 0-1, rollout: {node_group: rollout, placement: 2-3}}
  node_groups:
    - label: rollout
      node_ranks: 0
      accelerators: {per_node: 4}
      env_configs:
        - node_ranks: 0
          env_vars: {OMP_NUM_THREADS: 4}
          python_interpreter_path: /opt/rollout/bin/python
"""


def test_group_variables_do_not_reach_cluster_placed_processes(cli: Cli, tmp_path: Path) -> None:
    path = text_file(tmp_path / "two.yaml", TWO_GROUPS)
    env, rollout = (cli("inspect", "env", path, "-c", name, "-r", "0").out for name in ("env", "rollout"))
    assert "OMP_NUM_THREADS" not in env
    assert "the node's own  Ray's; with `rlinf up`: /opt/rollout/bin/python\n" in env
    assert "OMP_NUM_THREADS" in rollout
    assert f"/opt/rollout/bin/python  env_configs of rollout, {path}:11\n" in rollout
    data = json.loads(cli("inspect", "env", path, "-c", "env", "-r", "0", "--json").out)
    assert (data["python"], data["python_by_up"]) == (None, "/opt/rollout/bin/python")
    ended = cli("validate", path)
    assert ended.code == 0
    # The interpreter of the group serves `rollout`, so that nothing is left unused.
    assert "do not apply" not in ended.out + ended.err


def test_json_is_the_contract_of_inspect_env(cli: Cli, mixed: Path, contract: Contract) -> None:
    data = contract("env", cli("inspect", "env", mixed, "-c", "actor", "-r", "0", "--json").out)
    assert (data["component"], data["rank"], data["node_rank"]) == ("actor", 0, 0)
    assert data["python"] == "/opt/train/bin/python"
    assert data["python_layer"] == "env_configs of a800"
    assert data["python_place"] == {"file": str(mixed), "line": 10, "column": 36}
    variables = {variable["name"]: variable for variable in data["variables"]}
    assert variables["NCCL_SOCKET_IFNAME"]["node_group"] == "a800"
    assert variables["NCCL_SOCKET_IFNAME"]["place"]["line"] == 12
    assert variables["WANDB_API_KEY"]["value"] == "********"
    assert variables["RANK"]["layer"] == "runtime"


@pytest.mark.parametrize(
    ("component", "rank", "words"),
    [
        ("actr", "0", "did you mean `actor`?"),
        ("nothing", "0", "the components are `actor`"),
        ("actor", "4", "its ranks are 0 to 3"),
        ("actor", "-1", "--rank"),
    ],
)
def test_who_does_not_exist_is_2(cli: Cli, mixed: Path, component: str, rank: str, words: str) -> None:
    err = cli.refuses(2, "inspect", "env", mixed, "--component", component, "--rank", rank)
    assert words in err


MIB, GIB = 2**20, 2**30
ACTOR = ProcessForecast(
    "actor",
    2,
    {"base": 330 * MIB, "weights": 50 * MIB, "activations": 9000 * MIB, "trajectories": 20 * MIB},
    notes=("a note",),
)
ENV = ProcessForecast("env", 1, {"base": 130 * MIB, "simulators": 20 * GIB})


def placement_of(rank: int, accelerator: int | None) -> Placement:
    """A process on node 0."""
    held = () if accelerator is None else (accelerator,)
    return Placement(
        rank=rank,
        world_size=2,
        cluster_node_rank=0,
        placement_node_rank=0,
        local_rank=rank,
        local_world_size=2,
        local_accelerator_rank=accelerator,
        accelerator_type=None,
        visible_accelerators=held,
        visible_device_ids=(),
        isolate_accelerator=True,
        hardware_type="node",
        local_hardware_ranks=held,
        node_group_label="node",
    )


ON_HOST = {"actor": [placement_of(0, None), placement_of(1, None)], "env": [placement_of(0, None)]}
ON_TWO = {"actor": [placement_of(0, 0), placement_of(1, 1)], "env": [placement_of(0, None)]}
ROOMY = NodeMemory(64 * GIB, 80 * GIB)


def record(placements: Any = ON_HOST, node: NodeMemory = ROOMY, peaks: Any = None) -> dict[str, Any]:
    return memory_record((ACTOR, ENV), placements, {0: node}, peaks or {})


def test_parts_on_an_accelerator_are_none_of_the_host() -> None:
    # Weights are loaded on the host.
    host = 2 * (ACCELERATOR_LIBRARIES + (330 + 20 + 50) * MIB) + 130 * MIB + 20 * GIB
    assert node_needs((ACTOR, ENV), ON_TWO) == {0: (host, 9050 * MIB)}
    assert node_needs((ACTOR,), {"actor": [placement_of(0, None)]}) == {0: (9400 * MIB, 0)}
    # Those on one accelerator share it.
    shared = {"actor": [placement_of(0, 0), placement_of(1, 0)]}
    assert node_needs((ACTOR,), shared)[0][1] == 2 * 9050 * MIB


def test_components_that_offload_take_turns() -> None:
    rollout = ProcessForecast("rollout", 1, {"weights": 7 * MIB}, offloads=True)
    place = {"actor": [placement_of(0, 0)], "rollout": [placement_of(0, 0)]}
    both = (ACTOR._replace(offloads=True), rollout)
    assert node_needs(both, place)[0][1] == 9050 * MIB
    assert node_needs((ACTOR, rollout), place)[0][1] == 9057 * MIB
    # Rollouts that run ahead are there beside the trainer.
    assert node_needs(both, place, in_turns=False)[0] == (node_needs(both, place)[0][0], 9057 * MIB)


def test_units_follow_the_size() -> None:
    lines = memory_text(record(node=NodeMemory(24 * GIB, None, is_here=True))).splitlines()
    assert lines[0].split() == ["component", "processes", "host", "of", "which"]
    assert "9,400 MiB" in lines[1]
    assert "activations 9,000 MiB, base 330 MiB" in lines[1]
    assert "20.1 GiB" in lines[2]
    override = "(this machine; override: `--available GIB`, or `memory_gib` of a node group)"
    assert f"node 0: 38.5 GiB of 24.0 GiB {override}" in lines
    assert "node 0: 38.5 GiB of 24.0 GiB" in memory_text(record(node=NodeMemory(24 * GIB))).splitlines()


def test_accelerators_have_a_column_and_a_line() -> None:
    lines = memory_text(record(ON_TWO)).splitlines()
    assert lines[0].split()[2:4] == ["host", "accelerator"]
    assert "node 0, its fullest accelerator: 9,050 MiB of 80.0 GiB" in lines
    recorded = record(ON_TWO, NodeMemory(64 * GIB, 8 * GIB))
    (node,) = recorded["nodes"]
    assert (node["accelerator"], node["accelerator_available"], node["fits"]) == (9050 * MIB, 8 * GIB, False)
    assert recorded["components"]["actor"]["on_device"] == ["weights", "activations"]
    assert recorded["components"]["env"]["accelerator"] == 0


@pytest.mark.parametrize(
    ("places", "node", "last"),
    [
        (ON_HOST, ROOMY, ["note: a note"]),
        (
            ON_HOST,
            NodeMemory(24 * GIB),
            [
                "a node has too little memory; `env` takes the most, 20.1 GiB in its process",
                "  to reduce `simulators` (20.0 GiB): lower `env.train.num_processes`",
            ],
        ),
        (
            ON_TWO,
            NodeMemory(64 * GIB, 8 * GIB),
            [
                "an accelerator has too little memory; `actor` takes the most, 9,050 MiB in each of 2 processes",
                "  to reduce `activations` (9,000 MiB): lower `micro_batch_size` or `max_tokens_per_micro_batch`, or"
                " set `gradient_checkpointing: true`",
            ],
        ),
    ],
    ids=["roomy", "host", "accelerator"],
)
def test_keys_that_save_are_named_where_memory_is_too_small(places: Any, node: NodeMemory, last: list[str]) -> None:
    assert memory_text(record(places, node)).splitlines()[-len(last) :] == last


DECLARED = """
cluster:
  num_nodes: 3
  node_groups:
    - {label: train, node_ranks: 0-1, memory_gib: 512, accelerators: {per_node: 8, memory_gib: 80}}
    - {label: small, node_ranks: 1, memory_gib: 64}
"""


def test_nodes_have_what_the_file_declares() -> None:
    cluster = load_job("-", stdin=DECLARED.encode()).cluster
    assert cluster is not None
    here = 24 * GIB
    declared = [node_memory(cluster, rank, available=None, here=here) for rank in range(3)]
    # Of groups that share a node the least counts.
    assert declared == [
        NodeMemory(512 * GIB, 80 * GIB),
        NodeMemory(64 * GIB, 80 * GIB),
        NodeMemory(here, None, is_here=True),
    ]
    assert node_memory(cluster, 1, available=16, here=here).host == 16 * GIB
    assert node_memory(cluster, 2, available=None, here=None) == NodeMemory()


@pytest.mark.parametrize(
    ("has", "fits"),
    [
        (NodeMemory(), True),
        (NodeMemory(40 * GIB, 9 * GIB), True),
        (NodeMemory(20 * GIB, 9 * GIB), False),
        (NodeMemory(40 * GIB, 8 * GIB), False),
        (NodeMemory(None, 8 * GIB), False),
    ],
)
def test_a_job_fits_where_every_node_has_enough(has: NodeMemory, fits: bool) -> None:
    assert record(ON_TWO, has)["fits"] is fits


def test_peaks_of_a_run_stand_beside_the_forecast() -> None:
    peaks = {("actor", 0): {"run_training": Peak(9300 * MIB, 7)}, ("actor", 1): {"run_training": Peak(9350 * MIB)}}
    measured = record(peaks=peaks)
    actor, env = measured["components"]["actor"], measured["components"]["env"]
    assert (actor["host_measured"], actor["accelerator_measured"]) == (9350 * MIB, 7)
    assert (env["host_measured"], env["accelerator_measured"]) == (None, None)
    lines = memory_text(measured).splitlines()
    assert "host measured" in lines[0]
    assert "9,350 MiB" in lines[1]
    assert lines[2].split("20.1 GiB")[1].split()[0] == "-"
