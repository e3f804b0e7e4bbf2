"""`rlinf explain`, and its `--schema`."""

from __future__ import annotations

import json

import jsonschema
import pytest
from ruamel.yaml import YAML

from rlinf_cli.codes import Code, Example, all_codes, codes_by_stage
from rlinf_cli.job.explained import code_text
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.shipped import shipped_configs
from tests.unit.cli.typed import Cli


def test_a_code_has_meaning_a_wrong_and_a_right_example(cli: Cli) -> None:
    ended = cli("explain", "unknown-key")
    assert ended.code == 0
    assert ended.out.startswith("error[unknown-key]\n")
    wrong, right = ended.out.index("\nWrong\n"), ended.out.index("\nRight\n")
    assert wrong < ended.out.index("^", wrong) < right
    assert "^" not in ended.out[right:]
    assert ended.err == ""


def test_the_caret_is_under_what_the_markers_enclose(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Example("a: 1\nbb: «two»\n", overrides=("a=«3»",), assume=("a800=8",), files=(("base.yaml", "c: «4»\n"),))
    text = code_text(Code("some-code", Severity.ERROR, "a title", "a meaning", wrong, Example("a: 1\n")))
    lines = text.splitlines()
    for shown in ("bb: two", "a=3", "c: 4"):
        index, line = next((i, line) for i, line in enumerate(lines) if line.rstrip().endswith(shown) or shown in line)
        value = shown[-3:] if shown == "bb: two" else shown[-1]
        column = line.index(shown) + shown.index(value)
        assert lines[index + 1].rstrip() == lines[index + 1][:column] + "^" * len(value)
    assert "«" not in text
    assert "--assume a800=8" in text


def test_every_code_is_shown_and_stays_in_its_width(cli: Cli) -> None:
    for name, code in all_codes().items():
        out = cli.out("explain", name)
        assert f"{code.severity}[{name}]" in out
        assert "«" not in out
        prose = out.partition("\n\nWrong\n")[0].splitlines()[1:]
        assert max(map(len, prose)) <= 100


@pytest.mark.parametrize("pasted", ["error[unknown-key]", "[unknown-key]", "error[unknown-key]:", " unknown-key "])
def test_a_code_may_be_pasted_as_it_was_printed(cli: Cli, pasted: str) -> None:
    assert cli("explain", pasted).out == cli("explain", "unknown-key").out


def test_without_a_topic_all_codes_by_stage(cli: Cli) -> None:
    lines = cli("explain").out.splitlines()
    for stage, codes in codes_by_stage().items():
        at = lines.index(stage)
        assert [line.split()[0] for line in lines[at + 1 : at + 1 + len(codes)]] == [code.name for code in codes]


def test_a_field_with_its_type_default_and_meaning(cli: Cli) -> None:
    out = cli.out("explain", "cluster.node_groups.label")
    assert out.startswith("cluster.node_groups[].label: text\nrequired\n\nUnique, case-sensitive name")
    assert cli("explain", "cluster.node_groups[0].label").out == out


def test_a_section_lists_its_keys(cli: Cli) -> None:
    out = cli("explain", "cluster.node_groups.env_configs").out
    assert "\n  python_interpreter_path: text" in out


def test_recipes_that_differ_are_told_apart(cli: Cli) -> None:
    both = cli("explain", "actor.optim.lr").out
    assert "(recipe embodied, sft)" in both
    assert "(recipe agent, math)" in both
    one = cli("explain", "actor.optim.lr", "--recipe", "math").out
    assert "embodied" not in one
    assert one.startswith("actor.optim.lr: ")


@pytest.mark.parametrize(
    ("topic", "hint"),
    [
        ("unknown-kee", "did you mean `unknown-key`?"),
        ("cluster.node_grups", "did you mean `node_groups`?"),
        ("acto", "did you mean `actor`?"),
        ("lr", "`actor.optim.lr`"),
        ("no-such-thing-at-all", "`rlinf explain` lists them all"),
    ],
)
def test_an_unknown_topic_is_2_and_gets_a_suggestion(cli: Cli, topic: str, hint: str) -> None:
    assert hint in cli.refuses(2, "explain", topic)


def test_a_key_of_one_recipe_is_told_without_those_of_others(cli: Cli) -> None:
    err = cli.fails(2, "explain", "algorithm.off_policy")
    assert "do: its keys are now in `algorithm`" in err
    assert "known keys" not in err


def test_an_unknown_recipe_is_2(cli: Cli) -> None:
    assert "did you mean `embodied`?" in cli.fails(2, "explain", "actor", "--recipe", "embodid")


def test_json(cli: Cli) -> None:
    listed = json.loads(cli("explain", "--json").out)
    assert listed["schema"] == "rlinf.explain/1"
    assert [code["code"] for code in listed["codes"]] == list(all_codes())
    code = json.loads(cli("explain", "unknown-key", "--json").out)
    assert code["code"]["name"] == "unknown-key"
    assert "«" not in json.dumps(code, ensure_ascii=False)
    (field,) = json.loads(cli("explain", "cluster.num_nodes", "--json").out)["fields"]
    assert (field["path"], field["required"]) == ("cluster.num_nodes", True)


def test_a_word_is_not_taken_for_a_code(cli: Cli) -> None:
    assert "did you mean `runner`?" in cli("explain", "learner").err  # and not `leading-zero`
    assert "did you mean `unknown-key`?" in cli("explain", "unknownkey").err


def test_unknown_word_is_told_once_for_all_recipes(cli: Cli) -> None:
    err = cli.fails(2, "explain", "nope")
    assert "`nope` is neither a code nor a key at the top of a file" in err
    assert err.count("known keys") == err.count("`cluster`") == 1
    assert "`rlinf explain` lists the codes" in err
    near = cli("explain", "actr").err
    assert "did you mean `actor`?" in near
    assert "lists the codes" not in near


def test_unknown_key_is_explained_by_recipes_with_its_section(cli: Cli) -> None:
    err = cli.fails(2, "explain", "env.enable_offload")
    assert "there is no `enable_offload` in `env`" in err
    assert "our environments use no accelerator" in err
    assert "known keys" not in err


def test_shipped_configs_conform_and_a_mistyped_key_does_not(cli: Cli) -> None:
    schema = json.loads(cli("explain", "--schema").out)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    reader = YAML(typ="safe", pure=True)
    configs = {name: reader.load(file) for name, file in shipped_configs().items()}
    assert configs
    errors = [(name, error.message) for name, config in configs.items() for error in validator.iter_errors(config)]
    assert errors == []
    assert not validator.is_valid({"cluster": {"num_nodes": 1, "nodegroups": []}})


def test_one_recipe(cli: Cli) -> None:
    out = cli.out("explain", "--schema", "--recipe", "math")
    schema = jsonschema.Draft202012Validator(json.loads(out))
    config = {"recipe": "math", "cluster": {"num_nodes": 1}}
    assert schema.is_valid(config)
    assert not schema.is_valid(config | {"env": {}})


def test_an_unknown_recipe_is_2_of_schema(cli: Cli) -> None:
    assert "did you mean `math`?" in cli.refuses(2, "explain", "--schema", "--recipe", "maths")
