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
    assert messages("server.tenants=[ann, ben, ann]") == ["conflicting-settings: `ann` is listed twice"]


def test_folder_of_the_model_must_be_there() -> None:
    (message,) = messages("actor.model.model_path=/nowhere")
    assert "/nowhere" in message


def test_inputs_are_the_folders_that_are_read() -> None:
    assert inputs(config_of()) == []
    read = inputs(config_of("actor.model.model_path=/model", "actor.tokenizer.tokenizer_model=/tokenizer"))
    assert [str(path) for path in read] == ["/model", "/tokenizer"]


def test_full_weights_are_a_tenants() -> None:
    assert messages("server.tenants=[ann, ben]", "server.full_weights=ben") == []
    (message,) = messages("server.tenants=[ann, ben]", "server.full_weights=eve")
    assert "`eve` is not one of the tenants: ann, ben" in message


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that vLLM is installed."""
    monkeypatch.setattr("recipes.language.rules.engine_rules.missing_modules", lambda modules: [])


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("server.full_weights=default", "not from models whose weights are all their own"),
        ("server.max_rank=600", "of a rank up to 512"),
        ("rollout.engine_options={max_lora_rank: 8}", "the recipe sets `max_lora_rank`"),
        ("rollout.engine_options={dtype: half}", "the recipe sets `dtype`"),
    ],
)
def test_vllm_refuses_what_it_cannot_serve(override: str, message: str) -> None:
    assert messages("rollout.backend=vllm", "rollout.engine_options={max_loras: 2}") == []
    (refusal,) = messages("rollout.backend=vllm", override)
    assert message in refusal


def test_vllm_must_be_installed() -> None:
    (message,) = messages("rollout.backend=vllm")
    assert "needs the package `vllm`" in message
