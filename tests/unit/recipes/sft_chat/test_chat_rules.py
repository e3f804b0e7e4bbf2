"""Rules of recipe `sft_chat` about the files and folders of a job, `recipes.sft_chat.chat_rules`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save
from torch import ones

from tests.unit.recipes.sft_chat.chats import jsonl, turns

JOB = """\
recipe: sft
cluster:
  num_nodes: 1
  component_placement:
    actor: {node_group: node, placement: 0}
actor: {global_batch_size: 4, model: {model_path: MODEL}}
data: {type: chat, train_data_paths: ROWS}
runner: {seq_length: 64}
"""
TEXTS = {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    ("rows", "settings", "template", "refused"),
    [
        ([{"messages": turns("a", "b")}], "", False, True),
        ([{"messages": turns("a", "b")}], "", True, False),
        ([TEXTS, TEXTS], "data.apply_chat_template=false", False, False),
        ([TEXTS, TEXTS], "data.apply_chat_template=true", False, True),
    ],
)
def test_messages_need_a_chat_template_before_a_run(
    findings: Any, tmp_path: Path, rows: list[Any], settings: str, template: bool, refused: bool
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 3}')
    (folder / "model.safetensors").write_bytes(save({"one": ones(1)}))
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2}]}')
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"} if template else {}))
    file = jsonl(tmp_path / "chat.jsonl", rows)
    text = JOB.replace("MODEL", str(folder)).replace("ROWS", str(file))
    reported = findings(text, *([settings] if settings else []), messages=True)
    assert [(code, "no chat template" in message) for code, _, message, _ in reported] == (
        [("unusable-path", True)] if refused else []
    )
