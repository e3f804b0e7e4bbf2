from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("transformers")

from recipes.agent.llm import Chat, DrawSettings, LanguageModel, LimitReached
from recipes.agent.messages import ChatMessage, DrawnTurn, DrawRequest
from recipes.language.batch import RolloutBatch
from recipes.language.loop.prompts import NewWeights
from recipes.language.packing import pack
from recipes.language.sequences import Sequence as Answer
from tests.unit.recipes.agent.local import LocalEngine, agent_config
from tests.unit.recipes.language.orders import Script

# What a tool may say: text of all kinds, marks of the tokenizer's own, and nothing.
SAID = ("12", "", "<result>7</result>", "<eos>", "<pad>a", "naïve 数 😀", "a\nb", "<calculator>")


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    return LocalEngine(agent_config(), warm=True)


def said(chance: random.Random) -> str:
    """Return what a tool says: one of the above, or characters from anywhere in Unicode."""
    if chance.random() < 0.6:
        return chance.choice(SAID)
    codes = [chance.choice((0x7F, 0x2FFF, 0xD7FF, 0x10FFFF)) for _ in range(chance.randrange(6))]
    texts = [chr(chance.randrange(1, most)) for most in codes]
    return "".join(each for each in texts if not "\ud800" <= each <= "\udfff")


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


def check_learned(segments: Sequence[Answer], turns: Sequence[tuple[DrawRequest, DrawnTurn]]) -> None:
    """Check that exactly the tokens of turns are learned from in the segments of a run, each once, as drawn."""
    left = [[number for number, drawn in enumerate(learned(each)) if drawn] for each in segments]
    # Those of long pasts first: a branch with equal tokens would take them.
    for request, turn in sorted(turns, key=lambda each: -len(each[0].context)):
        before = (*request.context, *turn.observed)
        places = list(range(len(before), len(before) + len(turn.tokens)))
        number = next(
            number
            for number, each in enumerate(segments)
            if (*each.prompt, *each.tokens)[: places[-1] + 1] == (*before, *turn.tokens)
            and left[number][-len(places) :] == places
            and each.logprobs[places[0] - len(each.prompt) :][: len(places)] == turn.logprobs
        )
        del left[number][-len(places) :]
    assert not any(left)


def learned(segment: Answer) -> list[bool]:
    return [False] * len(segment.prompt) + list(segment.trained)


def settings(sample: int = 0, **changes: int) -> DrawSettings:
    return DrawSettings(sample, 1, 1.0, max_turns=6, max_tokens=120, max_new_tokens=8)._replace(**changes)


async def wander(model: LanguageModel, seed: int) -> list[Answer]:
    """Talk at random, and branch now and then."""
    chance = random.Random(seed)
    chats: list[Chat] = [model.conversation(chance.choice(SAID[:4]) + "1")]
    try:
        for _ in range(chance.randrange(1, 6)):
            chat = chance.choice(chats)
            reply = await chat.reply(stop=("9", "</calculator>") if chance.random() < 0.5 else ())
            assert reply.tokens
            chat.add(said(chance), "tool")
            if chance.random() < 0.3:
                chats.append(chat.fork())
    except LimitReached:
        pass
    return model.segments()


@pytest.mark.parametrize("first", [0, *(pytest.param(40 * n, marks=pytest.mark.nightly) for n in range(1, 25))])
def test_what_is_trained_is_what_was_drawn_and_engine_and_trainer_agree(engine: LocalEngine, first: int) -> None:
    witnesses = [Witness(engine) for _ in range(40)]
    models = [LanguageModel(each, settings(number)) for number, each in enumerate(witnesses)]

    found = engine.run(*(wander(model, first + number) for number, model in enumerate(models)))

    segments = [each for some in found for each in some]
    assert len(segments) > len(models)
    for some, witness in zip(found, witnesses, strict=True):
        check_learned(some, [each for each in witness.turns if each[1].tokens])
    batch = RolloutBatch.of(segments, 0, [0.0] * len(segments))
    assert engine.policy is not None
    with torch.no_grad():
        logprobs = engine.policy(pack(batch)).logprobs
    gap = (logprobs - batch.logprobs)[batch.trained].abs().max()
    assert float(gap) < 1e-4
    drawn = sum(model.turns for model in models)
    assert 0 < drawn <= int(batch.trained.sum())
    assert not bool(batch.logprobs[~batch.trained].any())


def test_a_conversation_without_room_is_over(engine: LocalEngine) -> None:
    async def run(text: str) -> str:
        try:
            await LanguageModel(engine, settings(max_tokens=20)).conversation(text).reply()
        except LimitReached as reached:
            return reached.limit
        return ""

    assert engine.run(run("1" * 20), run("1" * 19), run("1" * 101)) == ["tokens", "", "tokens"]


def test_draws_depend_on_the_conversation_and_not_on_its_company(engine: LocalEngine) -> None:
    async def run(sample: int) -> tuple[int, ...]:
        return (await LanguageModel(engine, settings(sample)).conversation("12*3=").reply()).tokens

    (alone,) = engine.run(run(3))
    together = engine.run(*(run(sample) for sample in range(6)))
    assert together[3] == alone
    assert len(set(together)) > 1


def request(number: int, version: int) -> DrawRequest:
    said = (ChatMessage("user", "12*3="),)
    return DrawRequest(number, 0, (), said, 120, 8, 1.0, seed=number, sample=0, version=version)


@pytest.mark.parametrize("partial", [True, False])
def test_turns_wait_for_the_weights_that_they_need_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch, partial: bool
) -> None:
    engine = LocalEngine(agent_config(runner={"max_staleness": 2, "partial_rollout": partial, "seq_length": 120}))
    fresh = {name: value.clone() for name, value in cast("Any", engine._engine)._model.state_dict().items()}
    versions = iter(range(10))

    def apply(update: SimpleNamespace, loaded: Any) -> None:
        loaded.load_weights(fresh.items(), update.version)

    def receive() -> SimpleNamespace:
        update = SimpleNamespace(version=next(versions))
        update.apply = lambda loaded: apply(update, loaded)
        return SimpleNamespace(done=lambda: True, wait=lambda: update)

    drawn: dict[int, DrawnTurn] = {}
    monkeypatch.setattr(engine, "_receive", receive)
    monkeypatch.setattr(engine, "_send", lambda agent, turns: drawn.update({each.request_id: each for each in turns}))
    engine._rests = False
    asked = tuple(request(number, version) for number, version in enumerate((0, 0, 0, 1)))
    engine._inbox = cast("Any", Script((0, NewWeights(0)), (0, asked), (3, NewWeights(1)), (4, None)))

    engine.serve_forever()

    assert sorted(drawn) == [0, 1, 2, 3]
    assert set(drawn[3].versions) == {1}
    assert {turn.versions[0] for number, turn in drawn.items() if number < 3} == {0}
    if not partial:
        assert {len(set(turn.versions)) for turn in drawn.values()} == {1}
