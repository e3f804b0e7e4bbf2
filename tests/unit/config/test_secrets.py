"""Hiding what looks secret."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.config.secrets import MASK, environment_secrets, is_secret, mask, mask_message, mask_text, secret_values
from rlinf_core.config.tree import MappingNode, to_data


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "GITHUB_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "SSH_KEY", "DB_PASSWORD", "PASSWORD", "TOKEN"),
        *("DB_PASS", "MYSQL_PWD", "GITHUB_PAT", "SENTRY_DSN", "SLACK_WEBHOOK_URL", "AZURE_STORAGE_CONNECTION_STRING"),
        *("Authorization", "proxy-authorization", "SESSION_COOKIE", "credential", "client_credentials"),
        *("AWS_SECRET_ACCESS_KEY", "CLIENT_SECRET_ID", "PGPASSWORD", "MY_PASSWORDS", "NPM_AUTHTOKEN"),
        *("password", "db_password", "passwd", "passphrase", "secret", "client_secret", "apiSecret", "Password"),
        *("token", "hf_token", "accessToken", "auth-token", "wandb_token", "Token"),
        *("HF_AUTH", "SIGNING_PRIVATE", "PLAIN_CREDENTIALS", "GOOGLE_APPLICATION_CREDENTIALS", "GCP_CREDENTIALS_JSON"),
        *("REGISTRY_CREDS", "GITHUB_SESSION", "AZURE_SAS", "DB_PW", "SSH_KEY_B64", "HF_TOKEN_2", "SITE_COOKIES"),
        *("api_key", "apiKey", "apikey", "wandb_api_key", "access_key", "private_key", "runner.logger.api_key"),
    ],
)
def test_secret(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "KEYBOARD", "GLOO_SOCKET_IFNAME", "MONKEY", "HF_HOME", "PATH"),
        *(
            "PWD",
            "OLDPWD",
            "BYPASS",
            "PATH_PATTERN",
            "DESKTOP_SESSION",
            "AUTHOR",
            "SSH_AUTH_SOCK",
            "render_pass",
            "pat",
        ),
        *("tokenizer_model", "tokenizer", "max_tokens", "max_new_tokens", "token_mean", "tokens", "num_tokens"),
        *("prompt_key", "answer_key", "image_key", "key", "keys", "keyboard", "monkey"),
        *("pad_token", "eos_token", "bos_token", "mask_token", "identity_file", "seed", "", "_", "4090", "per_token"),
    ],
)
def test_not_secret(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize("value", ["/etc/creds.json", "~/.config/gcp", "./key", "secrets/gcp.json"])
def test_path_is_no_secret_where_a_variable_may_name_a_file(value: str) -> None:
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "HF_AUTH", "SIGNING_PRIVATE"):
        assert not is_secret(name, value)
    assert is_secret("DB_PASSWORD", value)


@pytest.mark.parametrize("value", ["hunter2-xyz", "/9j/4AA+QSk=", "user:pass/word", '{"type": "service"}'])
def test_other_values_of_these_variables_are_secret(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PLAIN_CREDENTIALS", "HF_AUTH", "SIGNING_PRIVATE"):
        assert is_secret(name, value)
        monkeypatch.setenv(name, value)
        assert value in environment_secrets()
        assert "hunter2" not in mask_text(f"{name}: {value}")
    assert mask_text("{MY_AUTH: /etc/auth, b: 1}") == "{MY_AUTH: /etc/auth, b: 1}"


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


@pytest.mark.parametrize(
    ("text", "password"),
    [
        ("postgres://joe:hunter2@db/x", "hunter2"),
        ("redis://:hunter2@db:6379/0", "hunter2"),
        ("amqp://joe:p@ss@db/", "p@ss"),
        ("mongodb+srv://joe:a%20b@db", "a%20b"),
        ("http://joe:hunter2@proxy:3128", "hunter2"),
        ("https://ghp_abc@github.com/x", "ghp_abc"),
        ("clone git+https://tok:x-oauth@github.com, then", "x-oauth"),
    ],
)
def test_the_password_of_a_url_is_masked_everywhere(
    tree_of: Callable[..., MappingNode], text: str, password: str
) -> None:
    tree = tree_of(f"env_vars:\n  - DATABASE_URL: '{text}'\n")

    assert secret_values(tree) == {password}
    assert password not in str(to_data(mask(tree)))
    assert password not in mask_message(f"cannot reach {text}")
    assert len(mask_text(text)) == len(text)
    assert password not in mask_text(text)


@pytest.mark.parametrize(
    "text",
    ["ssh://git@host/x", "http://host:8000/a@b", "https://host/?at=a:b@c", "http://joe:${env:PW}@host", "a: b@c"],
)
def test_a_url_without_a_password_stays(tree_of: Callable[..., MappingNode], text: str) -> None:
    assert mask_text(text) == mask_message(text) == text
    assert to_data(mask(tree_of(f"a: '{text}'\n"))) == {"a": text}
