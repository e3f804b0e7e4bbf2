from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.agent.conversation.conversation import Conversation, ConversationError, no_turn

TOKENS = st.lists(st.integers(0, 50), min_size=1, max_size=6)
# Runs of tokens, each drawn by the model or told to it.
TURNS = st.lists(st.tuples(st.booleans(), TOKENS), min_size=1, max_size=8)


def said(conversation: Conversation, tokens: list[int], version: int = 0) -> None:
    conversation.draw(tokens, [-0.5 - token for token in tokens], [version] * len(tokens), "stop")


@given(TURNS)
def test_what_is_learned_from_are_the_drawn_tokens_and_no_others(turns: list[tuple[bool, list[int]]]) -> None:
    conversation = Conversation("0")
    expected: list[tuple[int, bool]] = []
    for drawn, tokens in turns:
        said(conversation, tokens, 7) if drawn else conversation.observe(tokens)
        expected += [(token, drawn) for token in tokens]

    segment = conversation.segment(3)

    assert list(conversation.tokens) == [token for token, _ in expected]
    if not any(drawn for _, drawn in expected):
        assert segment is None
        return
    assert segment is not None
    result = [(token, False) for token in segment.prompt] + list(zip(segment.tokens, segment.trained, strict=True))
    # What comes after the last turn of the model is seen by nobody.
    last = max(number for number, (_, drawn) in enumerate(expected) if drawn)
    assert result == expected[: last + 1]
    assert segment.trained[0]
    assert segment.trained[-1]
    for token, drawn, logprob, version in zip(
        segment.tokens, segment.trained, segment.logprobs, segment.versions, strict=True
    ):
        assert (logprob, version) == ((-0.5 - token, 7) if drawn else (0.0, 0))
    assert segment.drawn == sum(drawn for _, drawn in expected)
    assert segment.sample == 3


@given(TOKENS, TOKENS, TOKENS)
def test_a_branch_learns_from_its_own_turns_alone(messages: list[int], first: list[int], second: list[int]) -> None:
    trunk = Conversation("0")
    trunk.observe(messages)
    said(trunk, first)
    branch = trunk.fork("0.0")
    said(branch, second)
    said(trunk, second)

    trunk_segment, branch_segment = trunk.segment(0), branch.segment(0)

    assert trunk_segment is not None
    assert branch_segment is not None
    assert branch_segment.prompt == (*messages, *first)
    assert branch_segment.tokens == tuple(second)
    assert all(branch_segment.trained)
    assert trunk_segment.prompt == tuple(messages)
    assert trunk_segment.tokens == (*first, *second)


def test_a_turn_that_lacks_figures_is_refused() -> None:
    conversation = Conversation("0")
    with pytest.raises(ConversationError, match="2 tokens, 1 log-probabilities and 2 versions"):
        conversation.draw([1, 2], [0.0], [0, 0], "stop")


def test_a_reward_of_a_turn_comes_with_its_last_token() -> None:
    conversation = Conversation("0")
    conversation.observe([1])
    with pytest.raises(ConversationError, match="no model turn"):
        conversation.credit(1.0)
    said(conversation, [2, 3])
    conversation.observe([4])
    conversation.credit(0.5)
    said(conversation, [5])

    segment = conversation.segment(0)

    assert segment is not None
    assert segment.tokens == (2, 3, 4, 5)
    assert segment.rewards == (0.0, 0.5, 0.0, 0.0)


def test_nothing_is_learned_from_where_the_model_never_spoke() -> None:
    segment = no_turn(2)
    assert segment.drawn == 0
    assert segment.drawn_versions == []
    assert segment.sample == 2
