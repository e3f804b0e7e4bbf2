from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("transformers")

from recipes.agent.conversation.chat_model import DrawSettings, LanguageModel, LimitReached, MessagesRefused
from recipes.agent.conversation.turn_messages import ChatMessage, DrawnTurn, DrawRequest
from recipes.language.prompts.prompt_messages import NewWeights
from recipes.language.templates.chat_template import TemplateRefusalError
from tests.unit.recipes.agent.local import LocalEngine, agent_config
from tests.unit.recipes.language.orders import Script


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    return LocalEngine(agent_config(), warm=True)


def settings(sample: int = 0, **changes: int) -> DrawSettings:
    return DrawSettings(sample, 1, 1.0, max_turns=6, max_tokens=120, max_new_tokens=8)._replace(**changes)


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


def test_messages_that_cannot_be_written_cost_their_run_alone(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = engine._encoder.encode

    def refuse(context: Any, messages: Any, tools: Any = None) -> tuple[int, ...]:
        errors = {"1+1=": TemplateRefusalError("roles must alternate"), "2+2=": TypeError("of the template")}
        if messages[-1].text in errors:
            raise errors[messages[-1].text]
        return encode(context, messages, tools)

    monkeypatch.setattr(engine._encoder, "encode", refuse)

    async def run(text: str) -> str:
        model = LanguageModel(engine, settings())
        try:
            return str(len((await model.conversation(text).reply()).tokens) > 0)
        except MessagesRefused as refusal:
            assert model.turns == 0
            return str(refusal)

    result = engine.run(run("12*3="), run("1+1="), run("2+2="), run("3*12="))
    assert result == ["True", "roles must alternate", "TypeError: of the template", "True"]


def test_messages_are_counted_without_a_draw(engine: LocalEngine) -> None:
    async def run() -> tuple[int, int]:
        model = LanguageModel(engine, settings())
        chat = model.conversation("12*3=")
        return await model.count(chat), len((await chat.reply()).tokens)

    ((counted, drawn),) = engine.run(run())
    assert counted == 5
    assert drawn > 0


def request(number: int, version: int) -> DrawRequest:
    said = (ChatMessage("user", "12*3="),)
    return DrawRequest(number, 0, (), said, 120, 8, 1.0, seed=number, sample=0, version=version)


@pytest.mark.parametrize("partial", [True, False])
def test_turns_wait_for_their_weights_while_others_continue(monkeypatch: pytest.MonkeyPatch, partial: bool) -> None:
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
    monkeypatch.setattr(engine, "_send", lambda agent, turns: drawn.update({turn.request_id: turn for turn in turns}))
    engine._sleeps = False
    asked = tuple(request(number, version) for number, version in enumerate((0, 0, 0, 1)))
    engine._inbox = cast("Any", Script((0, NewWeights(0)), (0, asked), (3, NewWeights(1)), (4, None)))

    engine.serve_forever()

    assert sorted(drawn) == [0, 1, 2, 3]
    assert set(drawn[3].versions) == {1}
    assert {turn.versions[0] for number, turn in drawn.items() if number < 3} == {0}
    if not partial:
        assert {len(set(turn.versions)) for turn in drawn.values()} == {1}
