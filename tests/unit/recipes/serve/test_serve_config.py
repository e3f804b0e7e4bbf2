"""The file of recipe `serve`."""

from __future__ import annotations

import pytest

from recipes.serve.config import inputs
from rlinf_core.job.load import load_job
from tests.unit.recipes.serve.served import config_of


def messages(*overrides: str) -> list[str]:
    job = load_job("serve_laptop", overrides, environ={})
    return [f"{diagnostic.code}: {diagnostic.message}" for diagnostic in job.diagnostics]


def test_shipped_file_is_valid() -> None:
    assert messages() == []


@pytest.mark.parametrize("name", ["../x", "a b", "", ".", "x" * 65])
def test_tenant_names_a_file(name: str) -> None:
    assert any(name in message or "empty" in message for message in messages(f"server.tenants=['{name}']"))


def test_tenant_is_named_once() -> None:
    assert messages("server.tenants=[ann, ben, ann]") == ["conflicting-settings: `ann` is there twice"]


def test_folder_of_the_model_must_be_there() -> None:
    (message,) = messages("actor.model.model_path=/nowhere")
    assert "/nowhere" in message


def test_inputs_are_the_folders_that_are_read() -> None:
    assert inputs(config_of()) == []
    read = inputs(config_of("actor.model.model_path=/model", "actor.tokenizer.tokenizer_model=/tokenizer"))
    assert [str(path) for path in read] == ["/model", "/tokenizer"]
