"""Several adapters of one model."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

from recipes.language.models.load_model import built_model, built_tokenizer
from recipes.serve.values import AdapterSettings, Datum
from recipes.serve.workers.adapters import ModelVariants
from recipes.serve.workers.datum_packing import data_logprobs, shares
from rlinf_core import ConfigError


def adapters(seed: int = 0, hidden: int = 32) -> ModelVariants:
    build = partial(built_model, built_tokenizer(), hidden_dim=hidden, layers=1, seed=seed)
    return ModelVariants(build(), 32.0, build)


def data(*lengths: int) -> list[Datum]:
    tokens = [torch.arange(3, 3 + length) for length in lengths]
    return [Datum(row.numpy(), {"target_tokens": row.numpy()}) for row in tokens]


def logprobs(model: ModelVariants, name: str | None) -> torch.Tensor:
    with model.using(name), torch.no_grad():
        return data_logprobs(model.policy, data(5))


def changed(model: ModelVariants, name: str) -> None:
    with torch.no_grad():
        for weight in model.parameters(name).values():
            weight.add_(0.1)


def test_new_adapter_changes_nothing() -> None:
    model = adapters()
    plain = logprobs(model, None)
    model.add("a", AdapterSettings(4, 1))
    torch.testing.assert_close(logprobs(model, "a"), plain)


def test_adapters_are_computed_with_one_at_a_time() -> None:
    model = adapters()
    for name, rank in (("a", 4), ("b", 8)):
        model.add(name, AdapterSettings(rank, 1))
    plain = logprobs(model, None)
    changed(model, "a")
    assert not torch.allclose(logprobs(model, "a"), plain)
    torch.testing.assert_close(logprobs(model, "b"), plain)
    assert {weight.shape[0] for name, weight in model.parameters("b").items() if "lora_A" in name} == {8}
    model.remove("a")
    torch.testing.assert_close(logprobs(model, "b"), plain)
    assert "a" not in model


def test_removed_adapters_leave_nothing() -> None:
    model = adapters()
    model.add("a", AdapterSettings(4, 1))
    names = {name for name, _ in model.model.named_modules()}
    for _ in range(3):
        model.add("b", AdapterSettings(4, 1))
        model.remove("b")
    assert {name for name, _ in model.model.named_modules()} == names
    assert len(model.model.peft_config) == 1


def test_first_values_come_from_the_seed() -> None:
    one, other = adapters(), adapters()
    torch.manual_seed(5)
    one.add("a", AdapterSettings(4, 1))
    torch.manual_seed(6)
    other.add("a", AdapterSettings(4, 1))
    for name, weight in one.parameters("a").items():
        assert torch.equal(weight, other.parameters("a")[name])


def test_first_values_ignore_draws_of_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    right = adapters()
    right.add("a", AdapterSettings(4, 1))
    inject = peft.inject_adapter_in_model

    def interrupted(*args: Any) -> Any:
        torch.rand(3)  # from the generator of the process, as a thread that samples would
        return inject(*args)

    monkeypatch.setattr(peft, "inject_adapter_in_model", interrupted)
    model = adapters()
    model.add("a", AdapterSettings(4, 1))
    for name, weight in model.parameters("a").items():
        assert torch.equal(weight, right.parameters("a")[name])


@pytest.mark.parametrize(("kind", "layers"), [("attn", {"self_attn"}), ("mlp", {"mlp"}), ("unembed", {"lm_head"})])
def test_kinds_of_layers_are_chosen(kind: str, layers: set[str]) -> None:
    model = adapters()
    others = {f"train_{other}": other == kind for other in ("attn", "mlp", "unembed")}
    model.add("a", AdapterSettings(4, 1, **others))
    names = {part for name in model.parameters("a") for part in name.split(".")}
    assert names & {"self_attn", "mlp", "lm_head"} == layers


def test_saved_adapter_is_read_by_us_and_by_peft(tmp_path: Path) -> None:
    from peft import PeftModel

    model, settings = adapters(), AdapterSettings(4, 1)
    model.add("a", settings)
    changed(model, "a")
    model.save("a", settings, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
    other = adapters()
    assert other.load("b", tmp_path) == settings
    assert torch.equal(logprobs(other, "b"), logprobs(model, "a"))
    base: Any = built_model(built_tokenizer(), hidden_dim=32, layers=1)
    theirs: Any = PeftModel.from_pretrained(base, str(tmp_path))
    tokens = data(5)[0].tokens
    scores = theirs(input_ids=torch.tensor(tokens[None])).logits[0].log_softmax(-1)
    right = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(logprobs(model, "a"), right.detach(), atol=1e-5, rtol=1e-5)


def test_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    model, settings = adapters(), AdapterSettings(4, 1)
    model.add("a", settings)
    model.save("a", settings, tmp_path)
    other = adapters(hidden=64)
    with pytest.raises(ConfigError, match="another model"):
        other.load("b", tmp_path)
    assert "b" not in other


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks_share_a_batch(world_size: int) -> None:
    rows = [np.arange(10 * number, 10 * number + length) for number, length in enumerate((5, 2, 9, 3))]
    batch = [Datum(row, {"target_tokens": row}) for row in rows]
    parts = [shares(batch, world_size, rank, 9) for rank in range(world_size)]
    assert sorted(number for rank in parts for part in rank for number in part) == [0, 1, 2, 3]
    assert all(sum(len(batch[number].tokens) for number in part) <= 9 for rank in parts for part in rank)
