from __future__ import annotations

import asyncio

import pytest

from recipes.agent.conversation.turn_messages import DrawnTurn, DrawRequest, agent_key, engine_key
from recipes.agent.workers.engine_client import EngineClient
from rlinf_core import Channel, ChannelClosed


def request(text: int) -> DrawRequest:
    return DrawRequest(0, 0, (text,), (), 10, 5, 1.0, 0, 0)


def answer(asked: DrawRequest) -> DrawnTurn:
    return DrawnTurn(asked.request_id, (), (asked.context[0] + 1,), (0.0,), (0,), "", "stop")


def test_simultaneous_requests_share_one_message() -> None:
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

    async def run() -> tuple[int, list[int]]:
        serving = asyncio.create_task(engine())
        async with client.open():
            turns = await asyncio.gather(*(client.draw(0, request(number)) for number in range(10)))
        return await serving, [turn.tokens[0] for turn in turns]

    assert asyncio.run(run()) == (10, [number + 1 for number in range(10)])


def test_runs_of_a_task_keep_to_an_engine_and_load_is_shared() -> None:
    client = EngineClient(Channel.create("turns", local=True), 1, 3)

    routes = [client.route(8) for _ in range(4)]
    for _ in range(8):
        client.leave(routes[1])
    after = client.route(2)

    # Processes begin with different engines.
    assert [route.engine for route in routes] == [1, 2, 0, 1]
    assert after.engine == 2


def test_an_answer_that_nobody_waits_for_is_dropped() -> None:
    channel = Channel.create("turns", local=True)
    client = EngineClient(channel, 0, 1)

    async def run() -> int:
        async with client.open():
            given_up = asyncio.create_task(client.draw(0, request(1)))
            (first,) = await channel.get(key=engine_key(0), async_op=True).async_wait()
            given_up.cancel()
            waiting = asyncio.create_task(client.draw(0, request(2)))
            (second,) = await channel.get(key=engine_key(0), async_op=True).async_wait()
            channel.put((answer(first), answer(second)), key=agent_key(0))
            return (await waiting).tokens[0]

    assert asyncio.run(run()) == 3


def test_who_waits_is_told_that_the_engines_are_gone() -> None:
    channel = Channel.create("turns", local=True)
    client = EngineClient(channel, 0, 1)

    async def run() -> None:
        async with client.open():
            waiting = asyncio.create_task(client.draw(0, request(1)))
            await channel.get(key=engine_key(0), async_op=True).async_wait()
            channel.close()
            await waiting

    with pytest.raises(ChannelClosed):
        asyncio.run(run())
