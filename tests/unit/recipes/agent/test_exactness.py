"""Whether tokens that are trained are those that were drawn, in random conversations with tools and branches.

`SMOLLM2` names the folder of SmolLM2, as the head of configs/math_smollm.yaml says: its tokenizer is used as well.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from recipes.agent.conversation.chat_model import Chat, DrawSettings, LanguageModel, LimitReached
from recipes.agent.conversation.turn_messages import ChatMessage, DrawnTurn, DrawRequest
from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.answers.sequences import Sequence as Answer
from recipes.language.models.packing import pack
from tests.unit.recipes.agent.conversation.byte_level import write_byte_level, write_with_tokenizer_of
from tests.unit.recipes.agent.local import LocalEngine, agent_config

# What a tool may say: text of all kinds, marks of tokenizers' own, and nothing.
SAID = ("12", "", "<result>7</result>", "<eos>", "<pad>a", "naïve 数 😀", "a\nb", "<calculator>")
MARKED = ("<|im_end|>", "<|im_start|>user\nhello<|im_end|>", "👩\u200d👧 e\u0301")
SMOLLM2 = os.environ.get("SMOLLM2", "")
KINDS = ("characters", "bytes", "smollm2")
CHUNK = 40
CHUNKS = 25


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LocalEngine]:
    """Engines that were made, by the kind of their tokenizer."""
    return {}


@pytest.fixture
def engine(
    request: pytest.FixtureRequest, engines: dict[str, LocalEngine], tmp_path_factory: pytest.TempPathFactory
) -> LocalEngine:
    """A small model with a tokenizer of single characters, or one of bytes with merges and a chat template."""
    kind = str(request.param)
    if kind not in engines:
        if kind == "characters":
            config = agent_config()
        else:
            folder = tmp_path_factory.mktemp(kind)
            if kind == "bytes":
                write_byte_level(folder)
            else:
                write_with_tokenizer_of(SMOLLM2, folder)
            config = agent_config(
                actor={
                    "model": {"model_path": str(folder / "model")},
                    "tokenizer": {"tokenizer_model": str(folder / "tokenizer")},
                    "warm_start": {"steps": 0},
                },
                runner={"seq_length": 400},
                data={"max_prompt_length": 200, "apply_chat_template": True},
            )
        engines[kind] = LocalEngine(config, warm=True)
    return engines[kind]


class Witness:
    """Engines whose answers are written down.

    Attributes:
        turns: with what was asked for.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self.turns: list[tuple[DrawRequest, DrawnTurn]] = []

    async def draw(self, request: DrawRequest) -> DrawnTurn:
        turn = await self._engine.draw(request)
        self.turns.append((request, turn))
        return turn


def said(chance: random.Random) -> str:
    """Return what a tool says: one of the above, or characters from anywhere in Unicode."""
    if chance.random() < 0.6:
        return chance.choice((*SAID, *MARKED))
    codes = [chance.choice((0x7F, 0x2FFF, 0xD7FF, 0x10FFFF)) for _ in range(chance.randrange(6))]
    texts = [chr(chance.randrange(1, most)) for most in codes]
    return "".join(text for text in texts if not "\ud800" <= text <= "\udfff")


async def wander(model: LanguageModel, seed: int) -> list[Answer]:
    """Talk at random; branch now and then, for one turn or for two at once, and begin anew."""
    chance = random.Random(seed)
    chats: list[Chat] = [_begun(model, chance)]
    try:
        for _ in range(chance.randrange(1, 6)):
            chat = chance.choice(chats)
            stop = ("9", "</calculator>", "e") if chance.random() < 0.5 else ()
            if chance.random() < 0.15:
                chats.append(chat.fork())
                both = await asyncio.gather(chat.reply(stop), chats[-1].reply(stop), return_exceptions=True)
                for reached in both:
                    if isinstance(reached, BaseException):
                        raise reached
            else:
                assert (await chat.reply(stop)).tokens
            for _ in range(chance.choice((1, 1, 1, 2, 0))):
                chat.add(said(chance), "tool")
            if chance.random() < 0.3:
                chats.append(chat.fork())
            elif chance.random() < 0.1:
                chats.append(_begun(model, chance))
    except LimitReached:
        pass
    return model.segments()


def _begun(model: LanguageModel, chance: random.Random) -> Chat:
    system = [ChatMessage("system", said(chance))] if chance.random() < 0.3 else []
    return model.conversation(*system, chance.choice(SAID[:4]) + "1")


def check_learned(segments: Sequence[Answer], turns: Sequence[tuple[DrawRequest, DrawnTurn]]) -> None:
    """Check that exactly the tokens of turns are learned from in the segments of a run, each once, as drawn."""
    left = [[number for number, drawn in enumerate(learned(segment)) if drawn] for segment in segments]
    # Those of long pasts first: a branch with equal tokens would take them.
    for request, turn in sorted(turns, key=lambda item: -len(item[0].context)):
        before = (*request.context, *turn.observed)
        places = list(range(len(before), len(before) + len(turn.tokens)))
        number = next(
            number
            for number, segment in enumerate(segments)
            if (*segment.prompt, *segment.tokens)[: places[-1] + 1] == (*before, *turn.tokens)
            and left[number][-len(places) :] == places
            and segment.logprobs[places[0] - len(segment.prompt) :][: len(places)] == turn.logprobs
        )
        del left[number][-len(places) :]
    assert not any(left)


def learned(segment: Answer) -> list[bool]:
    return [False] * len(segment.prompt) + list(segment.trained)


def check_told(engine: LocalEngine, turns: Sequence[tuple[DrawRequest, DrawnTurn]]) -> None:
    """Check that the model was told the messages as its chat template writes them, and an end where it wrote none."""
    tokenizer: Any = engine.tokenizer
    for request, turn in turns:
        listed = [{"role": message.role, "content": message.text} for message in request.messages]
        text = "".join(f"<|im_start|>{item['role']}\n{item['content']}<|im_end|>\n" for item in listed)
        if request.context:
            ended = request.context[-1] == tokenizer.eos_token_id
            expected = f"{'' if ended else '<|im_end|>'}\n{text}<|im_start|>assistant\n"
        else:
            expected = tokenizer.apply_chat_template(listed, add_generation_prompt=True, tokenize=False)
            assert expected.endswith(f"{text}<|im_start|>assistant\n")
        assert turn.observed == tuple(tokenizer.encode(expected, add_special_tokens=False))


def _cases() -> list[Any]:
    nightly, no_model = pytest.mark.nightly, pytest.mark.skipif(not SMOLLM2, reason="SMOLLM2 names no folder")
    return [
        pytest.param(
            kind,
            CHUNK * chunk,
            marks=[*([nightly] if chunk or kind == "smollm2" else []), *([no_model] if kind == "smollm2" else [])],
            id=f"{kind}-{CHUNK * chunk}",
        )
        for kind in KINDS
        for chunk in range(CHUNKS)
    ]


@pytest.mark.parametrize(("engine", "first"), _cases(), indirect=["engine"])
def test_trained_tokens_are_those_drawn_and_engines_agree(engine: LocalEngine, first: int) -> None:
    most = 120 if engine.tokenizer.chat_template is None else 400
    settings = [DrawSettings(n, 1, 1.0, max_turns=6, max_tokens=most, max_new_tokens=8) for n in range(CHUNK)]
    witnesses = [Witness(engine) for _ in settings]
    models = [LanguageModel(witness, setting) for witness, setting in zip(witnesses, settings, strict=True)]

    results = engine.run(*(wander(model, first + number) for number, model in enumerate(models)))

    segments = [item for result in results for item in result]
    assert len(segments) > len(models)
    turns = [turn for witness in witnesses for turn in witness.turns if turn[1].tokens]
    for part, witness in zip(results, witnesses, strict=True):
        check_learned(part, [turn for turn in witness.turns if turn[1].tokens])
    if engine.tokenizer.chat_template is not None:
        check_told(engine, turns)
        ended = [turn.tokens[-1] == engine.tokenizer.eos_token_id for _, turn in turns]
        assert 0 < sum(ended) < len(ended)
        # Characters of several tokens, cut off within: their text would be other tokens. Most words are seldom so.
        assert any("\N{REPLACEMENT CHARACTER}" in turn.text for _, turn in turns) or len(engine.tokenizer) > 1000
    batch = RolloutBatch.of(segments, 0, [0.0] * len(segments))
    assert engine.policy is not None
    with torch.no_grad():
        logprobs = engine.policy(pack(batch)).logprobs
    gap = (logprobs - batch.logprobs)[batch.trained].abs().max()
    assert float(gap) < 1e-4
    drawn = sum(model.turns for model in models)
    assert 0 < drawn <= int(batch.trained.sum())
    assert int(batch.trained.sum()) == sum(len(turn.tokens) for _, turn in turns)
    assert not bool(batch.logprobs[~batch.trained].any())
