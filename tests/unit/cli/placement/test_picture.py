"""Pictures of placements, and the environment of a process."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_cli.job.job_layout import Layer, masked, process_interpreter, process_variables
from rlinf_cli.job.picture import (
    ACCELERATOR,
    Card,
    Cell,
    Picture,
    Section,
    User,
    labels_of,
    picture_record,
    summarised,
    unit_cells,
)
from rlinf_cli.report.page import placement_page
from rlinf_cli.runs.documents import DrawnPlacement
from rlinf_core.config.secrets import MASK
from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.config.tree import MappingNode, find, to_data
from rlinf_core.placement.component import ComponentPlacement
from rlinf_core.placement.strategies import FlexiblePlacementStrategy, NodePlacementStrategy
from rlinf_core.topology import ClusterTopology
from tests.unit.config.texts import tree_of
from tests.unit.test_topology import FRANKA
from tests.unit.test_topology import cluster as cluster_of


class _Page(HTMLParser):
    """The tags and the texts of a page, its styles left out."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] != ["style"] and data.strip():
            self.texts.append(data.strip())


def drawn(picture: Picture) -> _Page:
    record = picture_record(picture)
    # A run keeps the record, and reads it as a stranger's.
    kept = DrawnPlacement.model_validate(json.loads(json.dumps(record)))
    assert placement_page(record) == placement_page(kept)
    return _Page(placement_page(record))


def units(picture: Picture) -> list[dict[str, Any]]:
    cards = [card for section in picture_record(picture)["sections"] for card in section["cards"]]
    return [run for card in cards for row in card["rows"] for run in row["runs"]]


def node(rank: int, component: str, per_node: int = 8) -> Card:
    cells = (Cell(ACCELERATOR, i, (User(component, (rank * per_node + i,)),)) for i in range(per_node))
    return Card((rank,), None, tuple(cells), ())


def picture(cards: tuple[Card, ...], components: tuple[tuple[str, int], ...] = (("actor", 8),)) -> Picture:
    return Picture("job", "words", components, (Section("a800", "nodes", cards),))


def test_components_of_a_shared_unit_have_distinct_colours() -> None:
    shared = Cell(ACCELERATOR, 0, (User("actor", (0,)), User("rollout", (0, 1))))
    (unit,) = units(picture((Card((0,), None, (shared,), ()),), (("actor", 1), ("rollout", 2))))
    assert [(user["ranks"], user["color"]) for user in unit["users"]] == [("0", 0), ("0-1", 1)]
    assert unit["about"] == "node 0, accelerator 0: actor:0, rollout:0-1"


def test_a_process_on_several_units_is_drawn_once_across_them() -> None:
    wide = User("actor", (5,))
    (unit,) = units(picture((Card((0,), None, (Cell(ACCELERATOR, 0, (wide,)), Cell(ACCELERATOR, 1, (wide,))), ()),)))
    assert unit["units"] == ["0", "1"]


def test_robots_have_a_row_of_their_own() -> None:
    cells = (*(Cell(ACCELERATOR, index, ()) for index in range(9)), Cell("Franka", 0, (User("env", (0,)),), "10.0.0.1"))
    (section,) = picture_record(picture((Card((0,), None, cells, ()),), (("env", 1),)))["sections"]
    rows = [(row["columns"], len(row["runs"])) for row in section["cards"][0]["rows"]]
    assert rows == [(8, 8), (8, 1), (1, 1)]
    assert "Franka 0 · 10.0.0.1" in drawn(picture((Card((0,), None, cells, ()),), (("env", 1),))).texts


def test_one_node_shows_every_unit_and_rank() -> None:
    page = drawn(picture((node(0, "actor"),)))
    assert "node 0" in page.texts
    assert [run["units"] for run in units(picture((node(0, "actor"),)))] == [[str(unit)] for unit in range(8)]
    # Each number twice: as that of a unit, and as the rank on it.
    assert [page.texts.count(str(number)) for number in range(8)] == [2] * 8
    assert page.texts.count("actor") == 9
    assert "idle" not in page.texts
    assert "idle" in drawn(picture((Card((0,), None, (Cell(ACCELERATOR, 0, ()),), ()),))).texts


def test_processes_without_a_unit_are_a_bar_of_their_node() -> None:
    card = Card((3,), None, (), (User("agent", tuple(range(100))),))
    page = drawn(picture((card,), (("agent", 100),)))
    assert page.texts[-2:] == ["agent", "0-99"]


def test_hundreds_of_like_nodes_are_a_few_cards_and_a_count() -> None:
    page = drawn(picture(tuple(node(rank, "actor") for rank in range(300)), (("actor", 2400),)))
    assert "and 297 more" in page.texts
    assert "24-2399" in page.texts
    assert len(page.texts) < 200


def test_eighteen_nodes_are_all_drawn() -> None:
    texts = drawn(picture(tuple(node(rank, "actor") for rank in range(18)))).texts
    assert [text for text in texts if text.startswith("node ")] == [f"node {rank}" for rank in range(18)]


def test_unlike_nodes_are_never_more_than_a_page_or_two() -> None:
    cards = tuple(node(rank, f"c{rank}") for rank in range(500))
    short = summarised(picture(cards, tuple((f"c{rank}", 8) for rank in range(500))))
    (section,) = short.sections
    assert len(section.cards) == 60
    assert sorted(rank for card in section.cards for rank in card.ranks) == list(range(500))


def test_more_components_than_colours_stay_apart_by_stripes() -> None:
    names = tuple(f"c{index}" for index in range(10))
    cells = tuple(Cell(ACCELERATOR, i, (User(name, (0,)),)) for i, name in enumerate(names))
    shown = placement_page(picture_record(picture((Card((0,), None, cells, ()),), tuple((name, 1) for name in names))))
    assert shown.count('class="band c1 stripes"') == 2


@pytest.mark.parametrize("hostile", ["<script>&", "a\"b'c", "\x1b[31m\x00", "数据", "{{ 7*7 }}"])
def test_names_cannot_break_the_page(hostile: str) -> None:
    card = Card((0,), hostile, (Cell(hostile, 0, (User(hostile, (0,)),)),), ())
    page = drawn(Picture(hostile, hostile, ((hostile, 1),), (Section(hostile, hostile, (card,)),)))
    assert "script" not in page.tags
    assert "49" not in page.texts


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=1, max_size=40))
def test_every_rank_is_on_exactly_one_card(shapes: list[tuple[int, int]]) -> None:
    cards = tuple(
        Card(
            (rank,),
            None,
            tuple(Cell(ACCELERATOR, i, (User("actor", (i,)),)) for i in range(units)),
            tuple(User("agent", (i,)) for i in range(loose)),
        )
        for rank, (units, loose) in enumerate(shapes)
    )
    short = summarised(picture(cards, (("actor", 1), ("agent", 1))))
    assert [rank for section in short.sections for card in section.cards for rank in card.ranks] == list(
        range(len(shapes))
    )
    drawn(picture(cards, (("actor", 1), ("agent", 1))))


CLUSTER = ClusterConfig.model_validate(
    {
        "num_nodes": 3,
        "node_groups": [{"label": "a", "node_ranks": "all", "accelerators": {"per_node": 2}}],
        "component_placement": {
            "actor": {"node_group": "a", "placement": "0-3"},
            "env": {"node_group": "a", "placement": "1-2"},
            "agent": {"node_group": "node", "placement": "2:0-1"},
        },
    }
)


def unit_of(cell: Cell) -> tuple[int, str, int]:
    return cell.node_rank, cell.hardware_type, cell.local_hardware_rank


def test_every_unit_is_listed_with_its_users() -> None:
    topology = ClusterTopology.from_config(CLUSTER)
    components = ComponentPlacement(CLUSTER, topology)
    placements = {name: components.get_strategy(name).get_placement(topology) for name in components.components}
    assert [(*unit_of(cell), cell.kind, cell.users) for cell in unit_cells(topology, placements)] == [
        (0, "NVIDIA", 0, ACCELERATOR, (User("actor", (0,)),)),
        (0, "NVIDIA", 1, ACCELERATOR, (User("actor", (1,)), User("env", (0,)))),
        (1, "NVIDIA", 0, ACCELERATOR, (User("actor", (2,)), User("env", (1,)))),
        (1, "NVIDIA", 1, ACCELERATOR, (User("actor", (3,)),)),
        (2, "NVIDIA", 0, ACCELERATOR, ()),
        (2, "NVIDIA", 1, ACCELERATOR, ()),
        (2, "node", 0, "node", (User("agent", (0, 1)),)),
    ]


def test_robots_and_bare_nodes_are_units_too() -> None:
    arms = {"type": "Franka", "configs": [{"robot_ip": f"10.0.0.{node}", "node_rank": node} for node in (1, 2)]}
    with_arms = {"num_nodes": 3, "node_groups": [{"label": "arms", "node_ranks": "1-2", "hardware": arms}]}
    topology = ClusterTopology.from_config(ClusterConfig.model_validate(with_arms))
    robots = [cell for cell in unit_cells(topology, {}) if cell.kind == "Franka"]
    assert [(*unit_of(cell), cell.index, cell.address, cell.users) for cell in robots] == [
        (node, "Franka", 0, node - 1, f"10.0.0.{node}", ()) for node in (1, 2)
    ]
    groups = [{"label": "bare", "node_ranks": "all", "accelerators": {"per_node": 0}}]
    bare = ClusterTopology.from_config(ClusterConfig.model_validate({"num_nodes": 2, "node_groups": groups}))
    assert [unit_of(cell)[:2] for cell in unit_cells(bare, {})] == [(0, "node"), (1, "node")]


def test_labels_of_a_node_are_the_users_own() -> None:
    topology = ClusterTopology.from_config(cluster_of(3, FRANKA, {"label": "second", "node_ranks": "2"}))
    assert [labels_of(topology, rank) for rank in range(3)] == [(), ("arms",), ("arms", "second")]


@pytest.mark.parametrize(("name", "value", "shown"), [("HF_TOKEN", "x", MASK), ("A_KEY", "", ""), ("PATH", "/b", "/b")])
def test_masking_an_environment(name: str, value: str, shown: str) -> None:
    assert masked(name, value, ()) == shown


TEXT = """
cluster:
  num_nodes: 3
  forward_env: [WANDB_MODE, PATH, NCCL_DEBUG]
  component_placement:
    actor: {node_group: a, placement: 0-3}
    env: {node_group: a, placement: 1-2}
    agent: {node_group: node, placement: 2:0-1}
  node_groups:
    - label: a
      node_ranks: 0-1
      accelerators: {per_node: 2}
      env_configs:
        - node_ranks: 0
          python_interpreter_path: /opt/a/bin/python3
          env_vars:
            - NCCL_DEBUG: INFO
            - LD_LIBRARY_PATH: /opt/a/lib
    - label: everywhere
      node_ranks: all
      accelerators: {per_node: 2}
      env_configs:
        - node_ranks: all
          env_vars: {LEVEL: 2.50, CUDA_VISIBLE_DEVICES: "7", PYTHONPATH: ""}
"""


@pytest.fixture
def tree() -> MappingNode:
    return tree_of(TEXT)


@pytest.fixture
def cluster(tree: MappingNode) -> ClusterConfig:
    section = find(tree, ("cluster",))
    assert section is not None
    return ClusterConfig.model_validate(to_data(section))


def test_each_variable_says_what_set_it_and_where(cluster: ClusterConfig, tree: MappingNode) -> None:
    topology = ClusterTopology.from_config(cluster)
    placement = ComponentPlacement(cluster, topology).get_strategy("actor").get_placement(topology)[1]
    variables = process_variables(cluster, placement, tree)
    assert [variable.name for variable in variables] == sorted(variable.name for variable in variables)
    values = {
        variable.name: (variable.value, variable.layer, variable.span.text if variable.span else None)
        for variable in variables
    }
    ranks = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_LOCAL_RANK": "1", "NODE_RANK": "0", "RANK": "1"}
    runtime = ranks | {"CUDA_VISIBLE_DEVICES": "1", "MASTER_ADDR": "<at launch>", "MASTER_PORT": "<at launch>"}
    assert values == {
        **{name: (value, Layer.RUNTIME, None) for name, value in {**runtime, "WORLD_SIZE": "4"}.items()},
        "LD_LIBRARY_PATH": ("/opt/a/lib:<node's own>", Layer.PATH_MERGE, "/opt/a/lib"),
        "NCCL_DEBUG": ("INFO", Layer.ENV_CONFIGS, "INFO"),
        "PATH": ("<from the driver>:<node's own>", Layer.PATH_MERGE, "PATH"),
        "WANDB_MODE": ("<from the driver>", Layer.FORWARD_ENV, "WANDB_MODE"),
    }
    groups = {variable.name: variable.group for variable in variables if variable.group}
    assert groups == {"LD_LIBRARY_PATH": "a", "NCCL_DEBUG": "a"}
    # Without the file there are values but no places.
    again = process_variables(cluster, placement)
    assert [(variable.name, variable.value) for variable in again] == [(one.name, one.value) for one in variables]
    assert not any(variable.span for variable in again)


def test_what_a_group_gives_wins_over_the_runtime(cluster: ClusterConfig, tree: MappingNode) -> None:
    topology = ClusterTopology.from_config(cluster)
    placement = FlexiblePlacementStrategy([[2]], "everywhere").get_placement(topology)[0]
    values = {one.name: (one.value, one.layer, one.group) for one in process_variables(cluster, placement, tree)}
    assert values["CUDA_VISIBLE_DEVICES"] == ("7", Layer.ENV_CONFIGS, "everywhere")
    assert values["LEVEL"] == ("2.50", Layer.ENV_CONFIGS, "everywhere")
    assert values["PYTHONPATH"] == ("<node's own>", Layer.PATH_MERGE, "everywhere")
    assert "LD_LIBRARY_PATH" not in values
    alone = ClusterConfig.model_validate({"num_nodes": 1, "python_interpreter_path": "/opt/bin/python"})
    (placement,) = NodePlacementStrategy([0]).get_placement(ClusterTopology.from_config(alone))
    assert process_interpreter(alone, placement).layer == "cluster.python_interpreter_path"
