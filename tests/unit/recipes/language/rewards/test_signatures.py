"""Signatures of reward functions, from their sources and from the objects."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.language.rewards.signatures import Signature, detect_convention, signature_in_source
from rlinf_core import ConfigError

SOURCE = """
import functools
from os.path import join as imported

def ours(text, answer, *, strict=False): ...
async def judge(text, **others): ...
def verl(data_source, solution_str, ground_truth, extra_info=None, **kwargs): ...
def verl_batch(data_sources, solution_strs, ground_truths, extra_infos): ...
def trl(completions, solution, **kwargs): ...
def openrlhf(queries, prompts, labels, **kwargs): ...
def unknown(response, target):
    unknown = 1.0
    return unknown
def wants_more(text, answer, tokenizer): ...
def nothing(): ...
def positional(text, /): ...

@functools.cache
def decorated(anything): ...

def twice(text): ...
twice = functools.partial(twice)

raise SystemExit("this module was imported")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module that cannot be imported without an end."""
    (tmp_path / "read_only_rewards.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return "read_only_rewards"


@pytest.mark.parametrize(
    ("name", "convention"),
    [
        ("ours", "ours"),
        ("judge", "ours"),
        ("verl", "verl"),
        ("verl_batch", "verl batch"),
        ("trl", "trl"),
        ("openrlhf", "openrlhf"),
    ],
)
def test_conventions_are_told_from_the_source(module: str, name: str, convention: str) -> None:
    signature = signature_in_source(f"{module}:{name}")
    assert signature is not None
    assert detect_convention(signature, name) == convention


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("unknown", "`response`"),
        ("wants_more", "`tokenizer`"),
        ("nothing", "takes none"),
        ("positional", "positional-only"),
    ],
)
def test_other_signatures_are_refused_with_those_that_are_known(module: str, name: str, why: str) -> None:
    signature = signature_in_source(f"{module}:{name}")
    assert signature is not None
    with pytest.raises(ConfigError) as caught:
        detect_convention(signature, name)
    assert why in str(caught.value)
    assert "completions" in str(caught.value)


@pytest.mark.parametrize("name", ["decorated", "twice", "imported", "missing"])
def test_what_the_source_does_not_say_is_left_to_the_start(module: str, name: str) -> None:
    assert signature_in_source(f"{module}:{name}") is None


def test_the_object_and_its_source_have_one_signature(module: str) -> None:
    scope: dict[str, object] = {}
    exec(SOURCE.partition("raise SystemExit")[0], scope)  # noqa: S102  the source is above
    for name in ("ours", "judge", "verl", "trl", "nothing", "positional"):
        function = scope[name]
        assert callable(function)
        assert Signature.of(function) == signature_in_source(f"{module}:{name}")
