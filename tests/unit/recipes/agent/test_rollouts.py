"""Whether tokens that are trained are those that were drawn, in random conversations with tools and branches.

`SMOLLM2` names the folder of SmolLM2, as the head of configs/math/smollm2-laptop.yaml says: its tokenizer is used
as well.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from recipes.agent.conversation.chat_model import Chat, DrawSettings, LanguageModel, LimitReached, MessagesRefused
from recipes.agent.conversation.turn_messages import (
    ChatMessage,
    DrawnTurn,
    DrawRequest,
    EngineClient,
    agent_key,
    engine_key,
)
from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.answers.prompt_messages import NewWeights
from recipes.language.answers.sequences import Sequence as Answer
from recipes.language.models.packing import pack
from recipes.language.text.chat_template import TemplateRefusalError
from rlinf_core import Channel, ChannelClosed
from tests.unit.recipes.agent.conversation.byte_level import write_byte_level, write_with_tokenizer_of
from tests.unit.recipes.agent.local import LocalEngine, agent_config
from tests.unit.recipes.language.tiny import Script as Orders

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


@pytest.fixture(scope="module")
def small_engine() -> LocalEngine:
    return LocalEngine(agent_config(), warm=True)


def settings(sample: int = 0, **changes: int) -> DrawSettings:
    return DrawSettings(sample, 1, 1.0, max_turns=6, max_tokens=120, max_new_tokens=8)._replace(**changes)


def test_a_conversation_without_room_is_over(small_engine: LocalEngine) -> None:
    async def run(text: str) -> str:
        try:
            await LanguageModel(small_engine, settings(max_tokens=20)).conversation(text).reply()
        except LimitReached as reached:
            return reached.limit
        return ""

    assert small_engine.run(run("1" * 20), run("1" * 19), run("1" * 101)) == ["tokens", "", "tokens"]
    small_engine = LocalEngine(agent_config(rollout={"max_running_tokens": 10}), warm=True)
    assert small_engine.run(run("1" * 10), run("1" * 9)) == ["tokens", ""]


def test_draws_depend_on_the_conversation_and_not_on_its_company(small_engine: LocalEngine) -> None:
    async def run(sample: int) -> tuple[int, ...]:
        return (await LanguageModel(small_engine, settings(sample)).conversation("12*3=").reply()).tokens

    (alone,) = small_engine.run(run(3))
    together = small_engine.run(*(run(sample) for sample in range(6)))
    assert together[3] == alone
    assert len(set(together)) > 1


def test_messages_that_cannot_be_written_cost_their_run_alone(
    small_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = small_engine._encoder.encode

    def refuse(context: Any, messages: Any, tools: Any = None) -> tuple[int, ...]:
        errors = {"1+1=": TemplateRefusalError("roles must alternate"), "2+2=": TypeError("of the template")}
        if messages[-1].text in errors:
            raise errors[messages[-1].text]
        return encode(context, messages, tools)

    monkeypatch.setattr(small_engine._encoder, "encode", refuse)

    async def run(text: str) -> str:
        model = LanguageModel(small_engine, settings())
        try:
            return str(len((await model.conversation(text).reply()).tokens) > 0)
        except MessagesRefused as refusal:
            assert model.turns == 0
            return str(refusal)

    result = small_engine.run(run("12*3="), run("1+1="), run("2+2="), run("3*12="))
    assert result == ["True", "roles must alternate", "TypeError: of the template", "True"]


def test_messages_are_counted_without_a_draw(small_engine: LocalEngine) -> None:
    async def run() -> tuple[int, int]:
        model = LanguageModel(small_engine, settings())
        counted = await model.count([ChatMessage("user", "12*3=")], None)
        return counted, len((await model.conversation("12*3=").reply()).tokens)

    ((counted, drawn),) = small_engine.run(run())
    assert counted == 5
    assert drawn > 0


def asked_at(number: int, version: int) -> DrawRequest:
    said = (ChatMessage("user", "12*3="),)
    return DrawRequest(number, 0, (), said, 120, 8, 1.0, seed=number, sample=0, version=version)


@pytest.mark.parametrize("partial", [True, False])
def test_turns_wait_for_their_weights_while_others_continue(monkeypatch: pytest.MonkeyPatch, partial: bool) -> None:
    small_engine = LocalEngine(agent_config(runner={"max_staleness": 2, "partial_rollout": partial, "seq_length": 120}))
    fresh = {name: value.clone() for name, value in cast("Any", small_engine._engine)._model.state_dict().items()}
    versions = iter(range(10))

    def apply(update: SimpleNamespace, loaded: Any) -> None:
        loaded.load_weights(fresh.items(), update.version)

    def receive() -> SimpleNamespace:
        update = SimpleNamespace(version=next(versions))
        update.apply = lambda loaded: apply(update, loaded)
        return SimpleNamespace(done=lambda: True, wait=lambda: update)

    drawn: dict[int, DrawnTurn] = {}
    monkeypatch.setattr(small_engine, "_receive", receive)
    monkeypatch.setattr(
        small_engine, "_send", lambda agent, turns: drawn.update({turn.request_id: turn for turn in turns})
    )
    small_engine._sleeps = False
    asked = tuple(asked_at(number, version) for number, version in enumerate((0, 0, 0, 1)))
    small_engine._inbox = cast("Any", Orders((0, NewWeights(0)), (0, asked), (3, NewWeights(1)), (4, None)))

    small_engine.serve_forever()

    assert sorted(drawn) == [0, 1, 2, 3]
    assert set(drawn[3].versions) == {1}
    assert {turn.versions[0] for number, turn in drawn.items() if number < 3} == {0}
    if not partial:
        assert {len(set(turn.versions)) for turn in drawn.values()} == {1}


def request(text: int) -> DrawRequest:
    return DrawRequest(0, 0, (text,), (), 10, 5, 1.0, 0, 0)


def answer(asked: DrawRequest) -> DrawnTurn:
    return DrawnTurn(asked.request_id, (), (asked.context[0] + 1,), (0.0,), (0,), "", "stop")


async def test_simultaneous_requests_share_one_message() -> None:
    channel = Channel.create("turns", local=True)
    client = EngineClient(channel, 3, 1)

    async def engine() -> int:
        asked = await channel.get(key=engine_key(0), async_op=True).async_wait()
        assert {item.agent for item in asked} == {3}
        # In another order than they were asked for, and in two messages.
        turns = [answer(item) for item in reversed(asked)]
        channel.put(tuple(turns[:4]), key=agent_key(3))
        channel.put(tuple(turns[4:]), key=agent_key(3))
        return len(asked)

    serving = asyncio.create_task(engine())
    async with client.open():
        turns = await asyncio.gather(*(client.draw(0, request(number)) for number in range(10)))
    assert (await serving, [turn.tokens[0] for turn in turns]) == (10, [number + 1 for number in range(10)])


def test_runs_of_a_task_keep_to_an_engine_and_load_is_shared() -> None:
    client = EngineClient(Channel.create("turns", local=True), 1, 3)

    routes = [client.route(8) for _ in range(4)]
    for _ in range(8):
        client.leave(routes[1])
    after = client.route(2)

    # Processes begin with different engines.
    assert [route.engine for route in routes] == [1, 2, 0, 1]
    assert after.engine == 2


async def test_an_answer_that_nobody_waits_for_is_dropped() -> None:
    channel = Channel.create("turns", local=True)
    client = EngineClient(channel, 0, 1)
    async with client.open():
        given_up = asyncio.create_task(client.draw(0, request(1)))
        (first,) = await channel.get(key=engine_key(0), async_op=True).async_wait()
        given_up.cancel()
        waiting = asyncio.create_task(client.draw(0, request(2)))
        (second,) = await channel.get(key=engine_key(0), async_op=True).async_wait()
        channel.put((answer(first), answer(second)), key=agent_key(0))
        assert (await waiting).tokens[0] == 3


async def test_who_waits_is_told_that_the_engines_are_gone() -> None:
    channel = Channel.create("turns", local=True)
    client = EngineClient(channel, 0, 1)
    async with client.open():
        waiting = asyncio.create_task(client.draw(0, request(1)))
        await channel.get(key=engine_key(0), async_op=True).async_wait()
        channel.close()
        with pytest.raises(ChannelClosed):
            await waiting
