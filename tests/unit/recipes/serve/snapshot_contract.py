"""Tests that engines of several snapshots pass, against transformers with each adapter merged by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recipes.language.answers.sequences import Sequence
from recipes.sections.model_folders import ADAPTED
from recipes.serve.adapters import WEIGHTS
from recipes.serve.config import ServeConfig
from recipes.serve.snapshot_engines import SnapshotEngines
from recipes.serve.values import ADAPTER, Drawing, request_of
from recipes.training.tensor_files import write_tensors
from tests.unit.recipes.language.engines.contract import (
    END,
    VOCABULARY,
    contract_model,
    decode,
    plain_logprobs,
    prompts_of,
)

ALPHA, LONGEST = 8.0, 96
RANKS = {"small": 2, "large": 8}


class ContractTokenizer:
    """The part of a tokenizer that engines use."""

    decode = staticmethod(decode)

    def __len__(self) -> int:
        return VOCABULARY


def contract_config(folder: Path, **sections: dict[str, Any]) -> ServeConfig:
    """Return the configuration of a service with the contract's model.

    Made by hand, since an interpreter that has vLLM may lack what loading a file needs.
    """
    server = {"context_length": LONGEST, **sections.get("server", {})}
    actor = {"model": {"model_path": str(folder)}, "lora_alpha": ALPHA}
    placed = {"actor,rollout": {"node_group": "node", "placement": 0}}
    cluster = {"num_nodes": 1, "component_placement": placed}
    rollout = sections.get("rollout", {})
    fields = {"recipe": "serve", "cluster": cluster, "actor": actor, "rollout": rollout, "server": server}
    return ServeConfig.model_validate(fields)


def write_adapters(folder: Path) -> dict[str, str]:
    """Write an adapter of each rank, of all layers but the output, and return their folders by name."""
    layers = [name for name, _ in adapted(contract_model())]
    folders: dict[str, str] = {}
    for name, rank in RANKS.items():
        folders[name] = str(folder / name)
        Path(folders[name]).mkdir()
        settings = {"r": rank, "lora_alpha": ALPHA, "target_modules": layers, "peft_type": "LORA", "bias": "none"}
        Path(folders[name], ADAPTED).write_text(json.dumps({**settings, "task_type": "CAUSAL_LM"}))
        Path(folders[name], ADAPTER).write_text(json.dumps({"rank": rank, "seed": 0, "train_unembed": False}))
        write_tensors(Path(folders[name]) / WEIGHTS, adapter_weights(rank))
    return folders


def adapter_weights(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    weights: dict[str, Tensor] = {}
    for name, module in adapted(contract_model()):
        up, down = module.weight.shape
        key = f"base_model.model.{name}.lora"
        weights[f"{key}_A.weight"] = torch.randn(rank, down, generator=generator) * 0.1
        weights[f"{key}_B.weight"] = torch.randn(up, rank, generator=generator) * 0.1
    return weights


def adapted(model: Any) -> list[tuple[str, Any]]:
    """Return the layers that adapters of the contract have a part of: not all engines take the output layer."""
    modules = model.named_modules()
    return [(name, one) for name, one in modules if isinstance(one, torch.nn.Linear) and name != "lm_head"]


def merged(name: str | None) -> Any:
    """Return the model with an adapter merged: W + (alpha / rank) B A."""
    model = contract_model()
    if name is not None:
        weights = adapter_weights(RANKS[name])
        with torch.no_grad():
            for path, module in adapted(model):
                down, up = (weights[f"base_model.model.{path}.lora_{part}.weight"] for part in "AB")
                module.weight += ALPHA / RANKS[name] * up @ down
    return model


def drawing(request_id: str, snapshot: str | None, prompt: tuple[int, ...], **values: Any) -> Drawing:
    fields: dict[str, Any] = {"samples": 1, "max_tokens": 6, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "seed": 1}
    fields |= {"stop_tokens": (), "stop_texts": (), "prompt_logprobs": False, "prompt_last": len(prompt)}
    return Drawing(request_id, snapshot, prompt, **{**fields, **values})


def run(engines: SnapshotEngines, drawings: list[Drawing]) -> dict[tuple[str, int], Sequence]:
    """Return all answers by request and number."""
    for one in drawings:
        assert engines.has_room(one.snapshot)
        engines.begin(one, request_of(one))
    answers: dict[tuple[str, int], Sequence] = {}
    wanted = sum(one.samples for one in drawings)
    for _ in range(200 * wanted):
        answers |= {(answer.request_id, answer.sample): answer for answer in engines.draw().answers}
        if len(answers) == wanted:
            break
    assert len(answers) == wanted
    assert [answer.failure for answer in answers.values() if answer.failed] == []
    return answers


class SnapshotContract:
    """What holds of engines. A subclass has the fixture `engines`; `snapshots` are the folders of adapters."""

    def test_requests_are_drawn_by_their_adapters(self, engines: SnapshotEngines, snapshots: dict[str, str]) -> None:
        prompts = prompts_of(3)
        names = (None, *RANKS)
        asked = [
            drawing(
                f"{name}-{place}-{temperature}", snapshots.get(str(name)), prompt, samples=2, temperature=temperature
            )
            for name in names
            for place, prompt in enumerate(prompts)
            for temperature in (0.0, 0.7, 1.0)
        ]
        answers = run(engines, asked)
        for name in names:
            model = merged(name)
            for (request_id, _), answer in answers.items():
                if request_id.startswith(f"{name}-"):
                    temperature = float(request_id.rpartition("-")[2]) or 1.0
                    right = plain_logprobs(model, answer.prompt, answer.tokens, temperature)
                    np.testing.assert_allclose(answer.logprobs, right, atol=2e-3)
                    assert len(answer.tokens) == 6

    def test_prompts_have_logprobs_and_likely_tokens(self, engines: SnapshotEngines, snapshots: dict[str, str]) -> None:
        prompt = prompts_of(1, seed=3)[0] + (5, 6, 7)
        last = len(prompt) - 2
        one = drawing("a", snapshots["large"], prompt, prompt_logprobs=True, prompt_top=3, prompt_last=last, samples=2)
        answers = run(engines, [one])
        assert len(answers) == 2
        with torch.no_grad():
            right = merged("large")(torch.tensor([prompt])).logits[0].log_softmax(-1)
        scores, top = engines.prompt_logprobs(one), engines.prompt_top(one)
        assert np.isnan(scores[:2]).all()
        assert top.ids[:2].tolist() == [[0] * 3] * 2
        wanted = right.gather(1, torch.tensor(prompt)[1:, None])[1:, 0]
        np.testing.assert_allclose(scores[2:], wanted, atol=2e-3)
        values, ids = right[1:-1].topk(3)
        np.testing.assert_allclose(top.logprobs[2:], values, atol=2e-3)
        assert top.ids[2:].tolist() == ids.tolist()

    def test_answers_have_likely_tokens(self, engines: SnapshotEngines, snapshots: dict[str, str]) -> None:
        one = drawing("b", snapshots["small"], (3, 4), answer_top=4, temperature=0.5, samples=2)
        for answer in run(engines, [one]).values():
            with torch.no_grad():
                logits = merged("small")(torch.tensor([answer.prompt + answer.tokens])).logits[0, 1:-1]
            top = engines.answer_top(one, answer)
            values, ids = (logits / 0.5).log_softmax(-1).topk(4)
            np.testing.assert_allclose(top.logprobs, values, atol=4e-3)
            assert top.ids.tolist() == ids.tolist()

    def test_only_named_tokens_end_an_answer(self, engines: SnapshotEngines, snapshots: dict[str, str]) -> None:
        free = [drawing(str(seed), None, (9,), max_tokens=60, seed=seed, temperature=2.0) for seed in range(4)]
        answers = run(engines, free)
        assert {len(answer.tokens) for answer in answers.values()} == {60}
        assert any(END in answer.tokens for answer in answers.values())
        stopped = [one._replace(request_id=f"{one.request_id}s", stop_tokens=(END,)) for one in free]
        for (request_id, _), answer in run(engines, stopped).items():
            whole = answers[request_id[:-1], 0].tokens
            assert answer.tokens == (whole[: whole.index(END) + 1] if END in whole else whole)

    def test_missing_snapshot_fails_its_request_alone(self, engines: SnapshotEngines, tmp_path: Path) -> None:
        lost = drawing("c", str(tmp_path / "gone"), (3,))
        with pytest.raises(OSError, match="gone"):
            engines.begin(lost, request_of(lost))
        assert len(run(engines, [drawing("d", None, (3,))])) == 1

    def test_tokens_are_the_models(self, engines: SnapshotEngines) -> None:
        (answer,) = run(engines, [drawing("e", None, (VOCABULARY - 1,), temperature=2.0, max_tokens=40)]).values()
        assert max(answer.tokens) < VOCABULARY
