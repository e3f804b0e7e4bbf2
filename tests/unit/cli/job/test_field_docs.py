"""Documentation of the file's fields, from the models."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from rlinf_cli.job.field_docs import UnknownFieldError, describe, fields_below
from rlinf_core.job.find_recipe import find_recipe
from rlinf_core.job.load import ClusterFile
from rlinf_core.scalars import Float, Int, Text


class Optimizer(BaseModel):
    """How weights move.

    More that nobody needs to know here.
    """

    lr: Annotated[Float, Field(gt=0, le=1)] = Field(default=1e-3, description="Learning rate.")
    kind: Literal["adam", "sgd"] = "adam"


class Toy(BaseModel):
    """A toy."""

    name: Text = Field(description="What it is called.")
    steps: Annotated[Int, Field(ge=1, multiple_of=2)] | None = None
    optimizer: Optimizer = Field(default_factory=Optimizer)
    tags: tuple[Text, ...] = ("a", "b")
    parts: dict[str, list[Optimizer]] = Field(default_factory=dict[str, list[Optimizer]])


def test_whole_file_lists_its_sections() -> None:
    doc = describe(Toy)
    assert (doc.path, doc.description) == ("", "A toy.")
    assert [child.name for child in doc.children] == ["name", "steps", "optimizer", "tags", "parts"]


def test_required_field() -> None:
    doc = describe(Toy, "name")
    assert (doc.type, doc.required, doc.default, doc.description) == ("text", True, None, "What it is called.")


def test_default_is_written_as_in_a_file() -> None:
    assert describe(Toy, "tags").default == "[a, b]"
    assert describe(Toy, "optimizer.lr").default == "0.001"
    assert describe(Toy, "steps").default is None
    assert describe(Toy, "optimizer").default is None


def test_bounds_and_choices_are_told() -> None:
    assert describe(Toy, "optimizer.lr").type == "number, above 0, at most 1"
    assert describe(Toy, "optimizer.kind").type == "one of `adam`, `sgd`"


def test_section_without_a_description_speaks_through_its_model() -> None:
    assert describe(Toy, "optimizer").description == "How weights move."


@pytest.mark.parametrize("path", ["parts.left", "parts.left[0]", "parts.left[]", 'parts."a.b"'])
def test_names_and_indexes_are_left_open(path: str) -> None:
    doc = describe(Toy, path)
    assert doc.path == "parts.NAME"
    assert doc.type == "list of sections"
    assert [child.path for child in doc.children] == ["parts.NAME[].lr", "parts.NAME[].kind"]


@pytest.mark.parametrize(
    ("path", "help"),
    [
        ("optimiser", "did you mean `optimizer`?"),
        ("lr", "there is `optimizer.lr`, `parts.NAME[].lr`"),
        ("name.lr", "there is `optimizer.lr`, `parts.NAME[].lr`"),
        ("name.zzz", "it has no fields"),
        ("zzz", "known keys: `name`, `steps`, `optimizer`, `tags`, `parts`"),
        ("a b", "names are separated by `.`"),
        ("[0]", None),
    ],
)
def test_wrong_path_says_what_was_meant(path: str, help: str | None) -> None:
    with pytest.raises(UnknownFieldError) as caught:
        describe(Toy, path)
    assert caught.value.help == help


def test_keys_of_others_are_explained() -> None:
    model = find_recipe("embodied").config_model()
    with pytest.raises(UnknownFieldError) as caught:
        describe(model, "actor.optim.grad_clip")
    assert caught.value.help == "it is `clip_grad` here"
    with pytest.raises(UnknownFieldError) as caught:
        describe(model, "runner.ckpt_path")
    assert "`resume_dir` names the checkpoint" in (caught.value.help or "")
    with pytest.raises(UnknownFieldError) as caught:
        describe(model, "rollout.model_dir")
    assert "`actor.model.model_path`" in (caught.value.help or "")
    with pytest.raises(UnknownFieldError) as caught:
        describe(model, "algorithm.off_policy")
    assert caught.value.help == "its keys are now in `algorithm`"


def test_completion_gets_nothing_for_a_wrong_path() -> None:
    assert fields_below(Toy, "zzz") == []
    assert [doc.name for doc in fields_below(Toy, "optimizer")] == ["lr", "kind"]


def test_every_field_of_the_cluster_section_is_documented() -> None:
    pending = [describe(ClusterFile)]
    seen: set[str] = set()
    while pending:
        doc = pending.pop()
        assert doc.path not in seen
        seen.add(doc.path)
        assert doc.description or doc.name == "NAME", doc.path
        assert doc.type not in ("", "anything"), doc.path
        pending += [describe(ClusterFile, child.path) for child in doc.children]
    assert {"cluster.num_nodes", "cluster.node_groups[].env_configs[].env_vars"} <= seen
    assert "cluster.node_groups[].hardware.configs[].camera_serials" in seen
    assert "cluster.component_placement.NAME.placement" in seen


def test_losses_of_ones_own_are_among_the_kinds_that_have_a_key() -> None:
    text = describe(find_recipe("embodied").config_model(), "algorithm.gae_lambda").description
    assert text.endswith("Only with `loss_type`: `actor_critic`, `package.module:name`.")
