"""Hiding what looks secret."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.config.secrets import MASK, is_secret, mask, mask_text
from rlinf_core.config.tree import MappingNode, to_data


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "GITHUB_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "SSH_KEY", "DB_PASSWORD", "PASSWORD", "TOKEN"),
        *("AWS_SECRET_ACCESS_KEY", "CLIENT_SECRET_ID", "PGPASSWORD", "MY_PASSWORDS", "NPM_AUTHTOKEN"),
        *("password", "db_password", "passwd", "passphrase", "secret", "client_secret", "apiSecret", "Password"),
        *("token", "hf_token", "accessToken", "auth-token", "wandb_token", "Token"),
        *("api_key", "apiKey", "apikey", "wandb_api_key", "access_key", "private_key", "runner.logger.api_key"),
    ],
)
def test_secret(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "KEYBOARD", "GLOO_SOCKET_IFNAME", "MONKEY", "HF_HOME", "PATH"),
        *("tokenizer_model", "tokenizer", "max_tokens", "max_new_tokens", "token_mean", "tokens", "num_tokens"),
        *("prompt_key", "answer_key", "image_key", "key", "keys", "keyboard", "monkey"),
        *("pad_token", "eos_token", "bos_token", "mask_token", "identity_file", "seed", "", "_", "4090", "per_token"),
    ],
)
def test_not_secret(name: str) -> None:
    assert not is_secret(name)


@given(st.text())
def test_a_name_that_holds_a_password_is_secret(name: str) -> None:
    assert is_secret(f"{name}_PASSWORD")


def test_masking_a_tree(tree_of: Callable[..., MappingNode]) -> None:
    tree = tree_of("a: 1\napi_key: k\npassword: {x: 1, y: [2]}\nhf_token:\nsecret: ''\nb: [x, y]\n")
    data = to_data(mask(tree, {("b", 1)}))
    assert data == {
        "a": 1,
        "api_key": MASK,
        "password": {"x": MASK, "y": [MASK]},
        "hf_token": None,
        "secret": "",
        "b": ["x", MASK],
    }


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("HF_TOKEN: abc def", "HF_TOKEN: *** ***"),
        ("    - HF_TOKEN: 'ab'", "    - HF_TOKEN: ****"),
        ('"HF_TOKEN": ab', '"HF_TOKEN": **'),
        ("HF_TOKEN:abc", "HF_TOKEN:***"),
        ("a.hf_token=abc", "a.hf_token=***"),
        ("cluster.node_groups[0].env_vars[0].HF_TOKEN=a,b", "cluster.node_groups[0].env_vars[0].HF_TOKEN=***"),
        ("{HF_TOKEN: abc, x: 1}", "{HF_TOKEN: ***, x: 1}"),
        ("- {x: 1, HF_TOKEN: 'a, b', y: 2}", "- {x: 1, HF_TOKEN: *** **, y: 2}"),
        ("- {x: 1, HF_TOKEN: ab", "- {x: 1, HF_TOKEN: **"),
        ("url: http://h/?api_key=abc", "url: http://h/?api_key=***"),
        ("hf_token: ${env:HF_TOKEN}", "hf_token: ${env:HF_TOKEN}"),
        ("hf_token: ${env:X:-abc}", "hf_token: *************"),
        ("x: ${env:HF_TOKEN:-abc} y", "x: ${env:HF_TOKEN:****} y"),
        ("prompt_key: question", "prompt_key: question"),
        ("max_tokens: 5", "max_tokens: 5"),
        ("forward_env: [HF_TOKEN]", "forward_env: [HF_TOKEN]"),
        ("hf_token:", "hf_token:"),
        ("--api_key=abc", "--api_key=***"),
        ("{a: {HF_TOKEN: ab}, b: [c]}", "{a: {HF_TOKEN: **}, b: [c]}"),
    ],
)
def test_masking_a_line(line: str, shown: str) -> None:
    assert mask_text(line) == shown


def test_masking_values_of_several_lines() -> None:
    text = (
        "a: 1\npassword: |\n  one\n\n  two\nb: 2\n- hf_token: >-\n    x\n  c: 3\n- api_key:\n    'z'\n'token': |\n q\n"
    )
    shown = (
        "a: 1\npassword: *\n  ***\n\n  ***\nb: 2\n- hf_token: **\n    *\n  c: 3\n- api_key:\n    ***\n'token': *\n *\n"
    )
    assert mask_text(text) == shown


@given(st.text(alphabet="aHF_TOKENkey:= \n{}[],'\"$-#"))
def test_every_character_keeps_its_place(text: str) -> None:
    shown = mask_text(text)
    assert len(shown) == len(text)
    assert all(new in (old, "*") for old, new in zip(text, shown, strict=True))


@given(st.sampled_from(["HF_TOKEN: {}", "x: 1\n  - api_key: '{}'\n", "p.password={}", "{{a: b, secret: {}, c: d}}"]),
       st.text(alphabet="QWZ", min_size=1))  # fmt: skip
def test_the_value_is_gone(template: str, value: str) -> None:
    assert value not in mask_text(template.format(value))


@pytest.mark.parametrize(
    "text", ["a" * 100_000, "a-" * 50_000, "{api_key: 'a', " * 10_000, "'" * 100_000, "${x" * 40_000]
)
@pytest.mark.timeout(30)  # in time that grows with the square of its length, a line takes minutes
def test_odd_lines_are_masked_in_linear_time(text: str) -> None:
    assert "'a'" not in mask_text(text)
