"""Where values come from."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import BaseModel, Field

from rlinf_core.config.compose import Composed
from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.origins import origins
from rlinf_core.config.secrets import MASK, mask
from rlinf_core.config.tree import MappingNode, format_path, to_data

Compose = Callable[..., "tuple[Composed, Diagnostics]"]


class Optim(BaseModel):
    lr: float = 1e-4
    betas: tuple[float, ...] = (0.9, 0.99)


class Group(BaseModel):
    label: str
    ranks: str = "all"


class Job(BaseModel, arbitrary_types_allowed=True):
    name: str = Field(default="job", alias="title")
    optim: Optim = Optim()
    groups: tuple[Group, ...] = ()
    by_name: dict[str, Group] = {}
    hf_token: str = "default-token"
    nothing: None = None
    ports: range = range(20, 30)


def listed(tree: MappingNode, model: BaseModel | None = None) -> list[tuple[str, str, str]]:
    return [(format_path(origin.path), origin.text, origin.where) for origin in origins(tree, model)]


def test_files_overrides_and_references(composing: Compose) -> None:
    composed, _ = composing("a: {x: 2.50, y: []}\nb: ${a.x}\nc:\nd: [p, q]\n", "a.z=[1, 2]", "e={}")
    assert listed(composed.tree) == [
        ("a.x", "2.50", "job.yaml:1:8"),
        ("a.y", "[]", "job.yaml:1:17"),
        ("a.z[0]", "1", "override a.z=[1, 2]"),
        ("a.z[1]", "2", "override a.z=[1, 2]"),
        ("b", "2.50", "job.yaml:2:4"),
        ("c", "null", "job.yaml:3:1"),
        ("d[0]", "p", "job.yaml:4:5"),
        ("d[1]", "q", "job.yaml:4:8"),
        ("e", "{}", "override e={}"),
    ]


def test_defaults_follow_what_is_written(composing: Compose) -> None:
    composed, _ = composing("title: t\noptim: {lr: 1}\ngroups: [{label: a}]\nby_name: {g: {label: b}}\n")
    model = Job.model_validate(to_data(composed.tree))
    found = listed(composed.tree, model)
    defaults = [(path, text) for path, text, where in found if where == "default"]
    assert defaults == [
        ("optim.betas[0]", "0.9"),
        ("optim.betas[1]", "0.99"),
        ("groups[0].ranks", "all"),
        ("by_name.g.ranks", "all"),
        ("hf_token", MASK),
        ("nothing", "null"),
        ("ports", "20-29"),
    ]
    assert len(found) == len(defaults) + 4


def test_an_empty_value_that_only_the_model_has(composing: Compose) -> None:
    composed, _ = composing("title: t\n")
    found = listed(composed.tree, Job.model_validate(to_data(composed.tree)))
    assert ("optim.lr", "0.0001", "default") in found
    assert ("groups", "[]", "default") in found


def test_secrets_are_not_told(composing: Compose) -> None:
    composed, _ = composing("a: ${env:HF_TOKEN}\n", "b.api_key=hunter2", HF_TOKEN="hf_x")
    assert listed(mask(composed.tree, composed.secret)) == [
        ("a", f'"{MASK}"', "job.yaml:1:4"),
        ("b.api_key", f'"{MASK}"', "override b.api_key=*******"),
    ]
