"""How findings are shown: places, secrets, words for values."""

from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_cli.job.job_file import load_with_lint
from rlinf_core.config.diagnostics import Diagnostic, Severity, render_text
from rlinf_core.config.secrets import MASK, environment_secrets, is_secret, mask, mask_message, mask_text, secret_values
from rlinf_core.config.tree import Path, SourceText, Span, find, part, place, to_data
from rlinf_core.job.load import Job
from tests.unit.config.texts import LINES, composing, finding, tree_of


def test_block_is_the_one_of_the_specification() -> None:
    shown = render_text(finding(LINES, "0-64", help="8 nodes x 8 accelerators; did you mean 0-63?"))
    assert shown == (
        "configs/hetero.yaml:9:18: error[placement-out-of-range]: component `actor` asks for resource 64, but `a800`"
        " has resources 0-63\n"
        "    9 |       placement: 0-64\n"
        "      |                  ^^^^\n"
        "      = 8 nodes x 8 accelerators; did you mean 0-63?"
    )


def test_severity_is_named() -> None:
    assert ": warning[" in render_text(finding(LINES, "0-64", severity=Severity.WARNING))
    assert ": note[" in render_text(finding(LINES, "0-64", severity=Severity.NOTE))


@pytest.mark.parametrize(
    ("text", "piece", "line", "carets"),
    [
        pytest.param(
            "\n" * 1_234_566 + "key: value", "value", "1234567 | key: value", "        |      ^^^^^", id="gutter"
        ),
        pytest.param("标签: 节点 # x\n", "节点", "    1 | 标签: 节点 # x", "      |       ^^^^", id="wide"),
        pytest.param("e\u0301: bad\n", "bad", "    1 | e\u0301: bad", "      |    ^^^", id="combining"),
        pytest.param("\ta:\tbad\n", "bad", "    1 |     a:  bad", "      |         ^^^", id="tabs"),
        pytest.param("key:\n", "", "    1 | key:", "      | ^", id="nothing"),
        pytest.param("a: |\n  one\n  two\n", "|\n  one\n  two", "    1 | a: |", "      |    ^", id="first-line"),
    ],
)
def test_the_caret_stands_under_what_is_underlined(text: str, piece: str, line: str, carets: str) -> None:
    assert render_text(finding(text, piece)).splitlines()[1:3] == [line, carets]


def test_empty_file_has_no_excerpt() -> None:
    source = SourceText("f", "")
    assert render_text(Diagnostic("x", Severity.ERROR, "m", Span(source, 0, 0))) == "f: error[x]: m"


@pytest.mark.parametrize("character", ["\x1b", "\x00", "\x7f", "\u202e", "\u200b", "\x9b", "\r"])
def test_control_characters_never_reach_the_terminal(character: str) -> None:
    text = f"a: x{character}y bad\n"
    diagnostic = finding(text, "bad", name=f"f{character}", message=f"m{character}", help=f"h{character}")
    shown = render_text(diagnostic)
    assert character not in shown
    line, carets = shown.splitlines()[1:3]
    assert line.index("bad") == carets.index("^")


def test_long_line_is_cropped_around_the_caret() -> None:
    text = "a" * 500 + " bad " + "b" * 500 + "\n"
    _, line, carets = render_text(finding(text, "bad")).splitlines()
    assert len(line) <= 160
    assert line.split("| ")[1].startswith("…")
    assert line.endswith("…")
    assert line[carets.index("^") : carets.rindex("^") + 1] == "bad"


def test_line_is_cropped_only_where_something_is_cut() -> None:
    start = render_text(finding("bad " + "b" * 500, "bad")).splitlines()[1]
    assert start.startswith("    1 | bad")
    assert start.endswith("…")
    end = render_text(finding("b" * 500 + " bad", "bad")).splitlines()[1]
    assert end.startswith("    1 | …")
    assert end.endswith(" bad")


def test_one_enormous_line_is_cheap() -> None:
    text = "a" * 2_000_000 + " bad " + "b" * 2_000_000
    diagnostic = finding(text, "bad")
    # Without cropping 50 of them are minutes, and past the test's time limit.
    assert {len(render_text(diagnostic)) < 1000 for _ in range(50)} == {True}


def test_secret_values_are_never_shown() -> None:
    text = "env_vars:\n  - HF_TOKEN: hf_abcdef\n  - WANDB_API_KEY: >\n      wandb_1234\n    NCCL_DEBUG: INFO\n"
    for piece, hidden in (("HF_TOKEN", "hf_abcdef"), ("hf_abcdef", "hf_abcdef"), ("wandb_1234", "wandb_1234")):
        shown = render_text(finding(text, piece))
        assert hidden not in shown
        line, carets = shown.splitlines()[1:3]
        assert carets.count("^") == len(piece)
        assert carets.index("^") == line.index("|") + 2 + finding(text, piece).span.begin.column - 1
    assert "INFO" in render_text(finding(text, "INFO"))


def test_related_places_are_named() -> None:
    diagnostic = finding(LINES, "0-64")
    related = Span(diagnostic.span.source, 0, 7)
    with_related = Diagnostic("x", Severity.ERROR, "m", diagnostic.span, related=((related, "first set at"),))
    assert render_text(with_related).endswith("\n      = first set at: configs/hetero.yaml:1:1")


def test_color_changes_nothing_but_color() -> None:
    import re

    diagnostic = finding(LINES, "0-64", help="help")
    colored = render_text(diagnostic, color=True)
    assert "\x1b[" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == render_text(diagnostic)


@given(st.text(max_size=400), st.sampled_from([39, 79, 160]), st.data())
def test_caret_always_stands_under_its_piece(text: str, width: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    source = SourceText("f", text)
    block = render_text(Diagnostic("x", Severity.ERROR, "m", Span(source, start, end)), width=width)
    assert all(character.isprintable() or character in "\n\u3000" for character in block)
    if not text:
        return
    _, line, carets = block.split("\n")
    shown = sum(
        0 if unicodedata.category(c) in ("Mn", "Me") else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in line
    )
    assert shown <= width
    assert carets.rstrip().endswith("^")
    assert len(carets) <= width + 1


TEXT = """\
top:
  list:
    - a: 1  # comment
      b: 2

    # more
    - [x, y]
    -
      - z
  empty:
  flow: {k: v}
"""


@pytest.mark.parametrize(
    ("path", "underlined"),
    [
        ((), ""),
        (("top",), "top"),
        (("top", "list"), "list"),
        (("top", "list", 0), "a: 1"),
        (("top", "list", 0, "b"), "2"),
        (("top", "list", 1), "[x, y]"),
        (("top", "list", 1, 1), "y"),
        (("top", "list", 2), "- z"),
        (("top", "empty"), "empty"),
        (("top", "flow"), "flow"),
        (("top", "nope"), "top"),
        (("top", "list", 0, "c"), "a: 1"),
        (("nope", "x"), ""),
    ],
)
def test_place(path: Path, underlined: str) -> None:
    tree = tree_of(TEXT)
    span = place(tree, path)
    assert span.text == underlined
    if not underlined:
        assert span.start == 0


def test_mapping_composed_of_two_sources_has_a_first_line() -> None:
    composed, _ = composing("a:\n" + "#" * 500 + "\n  - {b: 1}\n", "a[0]={}", "a[0].c=2")
    assert place(composed.tree, ("a", 0)).text in ("{}", "c", "c=2")


@pytest.mark.parametrize(
    ("written", "start", "end", "piece"),
    [
        ("abcdef", 2, 4, "cd"),
        ("'abcdef'", 2, 4, "cd"),
        ('"abcdef"', 2, 4, "cd"),
        ('"ab\\x63def"', 2, 4, None),
        ("'it''s a b'", 2, 4, None),
        ("ab\n  cdef", 2, 4, None),
        ("bc", 1, 1, "c"),
        ("[b]", 0, 1, None),
    ],
)
def test_part_of_a_scalar(written: str, start: int, end: int, piece: str | None) -> None:
    span = part(find(tree_of(f"a: {written}\n"), ("a",)), start, end)
    assert (span.text if span else None) == piece


SECRET_NAMES = """
    HF_TOKEN GITHUB_TOKEN WANDB_API_KEY OPENAI_API_KEY SSH_KEY DB_PASSWORD PASSWORD TOKEN DB_PASS MYSQL_PWD GITHUB_PAT
    SENTRY_DSN SLACK_WEBHOOK_URL AZURE_STORAGE_CONNECTION_STRING Authorization proxy-authorization SESSION_COOKIE
    credential client_credentials AWS_SECRET_ACCESS_KEY CLIENT_SECRET_ID PGPASSWORD MY_PASSWORDS NPM_AUTHTOKEN password
    db_password passwd passphrase secret client_secret apiSecret Password token hf_token accessToken auth-token
    wandb_token Token HF_AUTH SIGNING_PRIVATE PLAIN_CREDENTIALS GOOGLE_APPLICATION_CREDENTIALS GCP_CREDENTIALS_JSON
    REGISTRY_CREDS GITHUB_SESSION AZURE_SAS DB_PW SSH_KEY_B64 HF_TOKEN_2 SITE_COOKIES api_key apiKey apikey
    wandb_api_key access_key private_key runner.logger.api_key X-API-KEY
"""
PLAIN_NAMES = """
    TOKENIZERS_PARALLELISM MAX_TOKENS KEYBOARD GLOO_SOCKET_IFNAME MONKEY HF_HOME PATH PWD OLDPWD BYPASS PATH_PATTERN
    DESKTOP_SESSION AUTHOR SSH_AUTH_SOCK render_pass pat tokenizer_model tokenizer max_tokens max_new_tokens token_mean
    tokens num_tokens prompt_key answer_key image_key key keys keyboard monkey pad_token eos_token bos_token mask_token
    identity_file seed _ 4090 per_token
"""


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_secret(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["", *PLAIN_NAMES.split()])
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


def test_masking_a_tree() -> None:
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
    text = "a: 1\npassword: |\n  one\n\n  two\nb: 2\n- hf_token: >-\n    x\n  c: 3\n- api_key:\n    'z'\nsecret: |\n q"
    shown = "a: 1\npassword: *\n  ***\n\n  ***\nb: 2\n- hf_token: **\n    *\n  c: 3\n- api_key:\n    ***\nsecret: *\n *"
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
def test_the_password_of_a_url_is_masked_everywhere(text: str, password: str) -> None:
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
def test_a_url_without_a_password_stays(text: str) -> None:
    assert mask_text(text) == mask_message(text) == text
    assert to_data(mask(tree_of(f"a: '{text}'\n"))) == {"a": text}


GROUPED = "cluster:\n  num_nodes: 2\n  node_groups:\n    - {label: a, node_ranks: 0, "
LAPTOP = (
    "recipe: embodied\ncluster:\n  num_nodes: 1\n"
    "  component_placement: {'actor,rollout,env': {node_group: node, placement: 0}}\n"
)


def load(text: str) -> Job:
    return load_with_lint("-", stdin=text.encode(), environ={})


@pytest.mark.parametrize(
    ("group", "place", "help"),
    [
        ("accelerators: {gpus: 8}", "gpus", "did you mean `per_node`?"),
        ("accelerators: {num_gpus: 8, model: A800}", "num_gpus", "did you mean `per_node`?"),
        ("accelerators: 8", "8", "write `{per_node: 8}`"),
        ("accelerators: '4'", "'4'", "write `{per_node: 4}`"),
        ("memory_gib: 80GB", "80GB", "write the number alone: `80`"),
        ("memory_gib: 1.5 TiB", "1.5 TiB", "write the number alone: `1.5`"),
        ("memory_gib: '64,80'", "'64,80'", "write one of them; `rlinf train` trains with each"),
        ("memory_gib: '1,000'", "'1,000'", "write `1000`"),
        ("ssh: {key: ~/.ssh/id}", "key", "did you mean `identity_file`?"),
        ("ssh: {timeout: 3}", "timeout", "did you mean `connect_timeout`?"),
        ("ssh: {connect_timeout: 10s}", "10s", "write the number alone: `10`"),
        ("env_configs: [{node_ranks: 0, env_vars: [{FOO-BAR: 1}]}]", "FOO-BAR", "did you mean `FOO_BAR`?"),
        ("env_configs: [{node_ranks: 0, env_vars: {1A: 1}}]", "1A", "write it as in `NCCL_DEBUG`"),
        (
            "env_configs: [{node_ranks: 0, env_vars: [LEVEL=INFO]}]",
            "LEVEL=INFO",
            "write `- LEVEL: INFO`",
        ),
        (
            "hardware: {type: Franka, configs: [{node_rank: 0, robot_ip: arm1.lab}]}",
            "arm1.lab",
            "give the address that `getent hosts arm1.lab` shows",
        ),
    ],
)
def test_each_slip_is_one_finding_with_what_to_write(group: str, place: str, help: str) -> None:
    (diagnostic,) = load(f"{GROUPED}{group}}}\n").diagnostics
    assert (diagnostic.span.text, diagnostic.help) == (place, help)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("clip_grad", ".inf", "expected a finite number, found infinity"),
        ("clip_grad", ".inf", "write 0 for none (no clipping)"),
        ("clip_grad", "-.inf", "must be at least 0, found `-.inf`"),
        ("lr", ".nan", "`.nan`"),
        ("lr", "1e999", "must be a number below 1.8e308"),
        ("lr", "1" + "0" * 400, "must be a number below 1.8e308"),
        ("lr", "1" * 5000, "expected a number, found text"),
        ("lr_warmup_steps", "1" * 400, "at most 18 digits"),
        ("lr_warmup_steps", ".inf", "found infinity"),
        ("lr_warmup_steps", "1.5", "expected an integer"),
    ],
)
def test_numbers_beyond_numbers_are_named(key: str, value: str, words: str) -> None:
    (diagnostic,) = load(f"{LAPTOP}actor: {{optim: {{{key}: {value}}}}}\n").diagnostics
    assert words in f"{diagnostic.message} {diagnostic.help}"


@pytest.mark.parametrize(("text", "steps"), [("1e3", 1000), ("10.0", 10), ("2E+2", 200)])
def test_float_that_is_an_integer_is_one(text: str, steps: int) -> None:
    job = load(f"{LAPTOP}runner: {{max_steps: {text}}}\n")
    assert job.config is not None
    assert job.config.runner.max_steps == steps  # type: ignore[attr-defined]


@pytest.mark.parametrize("section", ["actor: {model: {model_type: TARGET}}", "env: {train: {env_type: TARGET}}"])
@pytest.mark.parametrize("target", ["os:path", "json.decoder:JSONDecoder"])
def test_standard_library_holds_nothing_of_a_user(section: str, target: str) -> None:
    findings = load(LAPTOP + section.replace("TARGET", target)).diagnostics
    (error,) = [finding for finding in findings if finding.severity is not Severity.NOTE]
    assert error.code == "unknown-choice"
    assert "standard library" in error.message


def test_infinity_where_it_is_allowed_stays() -> None:
    from pydantic import TypeAdapter

    from rlinf_core.scalars import Float, YamlFloat

    assert TypeAdapter(Float).validate_python(YamlFloat(math.inf, ".inf")) == math.inf
