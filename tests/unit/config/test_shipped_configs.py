"""Configurations that ship, names on a hub, and paths."""

from __future__ import annotations

import json
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.sections.values import EVALUATION, TRAINING, files_of_part
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core import ConfigError
from rlinf_core.config.composing.references import parse_path, to_path
from rlinf_core.config.diagnostics import Severity, render_text
from rlinf_core.config.sections.hub_names import HubPath, commit_of, ensure_here, hub_paths, located, pins_of
from rlinf_core.config.shipped import shipped_configs
from rlinf_core.config.source import NotationError
from rlinf_core.config.tree import Path as TreePath
from rlinf_core.config.tree import format_path
from rlinf_core.job.find_recipe import find_recipe, recipe_names
from rlinf_core.job.load import load_job
from rlinf_core.placement.component import HybridComponentPlacement
from rlinf_core.runners.storage.run_folder import config_text_of
from tests.hub_stand_in import served

BRING_YOUR_OWN = (
    "agent_hetero",
    "math_smollm",
    "math_eval",
    "math_32b_8node",
    "math_moe_8gpu",
    "math_grpo_8gpu",
    "math_async_disaggregated",
    "math_gsm8k",
    "sft_laptop",
    "libero_sft",
    "collocated",
    "disaggregated",
    "hybrid",
    "libero_4090_a800",
    "libero_pi0_ppo",
    "smolvla_sft_rl",
    "metaworld_press_sft",
    "metaworld_dsrl",
    "franka_rlpd_sim",
    "franka_hil",
    "franka_real",
    "success_classifier",
    "franka_vision_sft",
)


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_it_loads_without_a_finding(name: str) -> None:
    job = load_with_lint(name, environ={})
    # Models and data of its size come with no package.
    expected = "unusable-path" if name in BRING_YOUR_OWN else ""
    worth_saying = [
        diagnostic
        for diagnostic in job.diagnostics
        if diagnostic.severity is not Severity.NOTE and diagnostic.code != expected
    ]
    assert [render_text(item) for item in worth_saying] == []
    assert job.cluster is not None


def test_those_that_the_documents_name_are_there() -> None:
    assert {"hetero18", "collocated", "disaggregated", "hybrid", "laptop", "math_laptop"} <= set(shipped_configs())


@pytest.mark.parametrize(
    ("former", "now"), [("libero_8gpu", "`collocated`"), ("serve_smollm.yaml", "`serve_laptop actor.model")]
)
def test_the_name_of_an_earlier_release_is_answered_with_todays(former: str, now: str) -> None:
    (finding,) = load_job(former, environ={}).diagnostics
    assert finding.code == "missing-file"
    assert now in str(finding.help)


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipes_default_is_a_file_of_that_recipe(name: str) -> None:
    recipe = find_recipe(name)
    job = load_job(recipe.default_config, environ={})
    assert job.recipe is recipe
    assert isinstance(job.config, recipe.config_model())


@pytest.mark.parametrize("mode", ["collocated", "disaggregated", "hybrid"])
def test_the_three_modes_are_what_they_are_called(mode: str) -> None:
    job = load_job(mode, environ={})
    assert job.cluster is not None
    assert job.topology is not None
    placement = HybridComponentPlacement(job.cluster, job.topology)
    assert placement.placement_mode.name.lower() == mode


def test_the_heterogeneous_example_is_the_one_of_eighteen_nodes() -> None:
    cluster = load_job("hetero18", environ={}).cluster
    assert cluster is not None
    assert cluster.num_nodes == 18
    assert [(node_group.label, str(node_group.node_ranks)) for node_group in cluster.node_groups] == [
        ("a800", "0-7"),
        ("4090", "8-15"),
        ("franka", "16-17"),
    ]
    assert {name: (str(value.rank_map), value.node_group) for name, value in cluster.component_placement.items()} == {
        "actor": ("0-63", ("a800",)),
        "rollout": ("0-63", ("4090",)),
        "env": ("0-1", ("franka",)),
        "agent": ("0-1:0-199,2-3:200-399", ("node",)),
    }
    assert cluster.node_groups[0].env_configs[0].python_interpreter_path == "/opt/venv/openpi/bin/python3"


def test_language_models_train_while_others_answer() -> None:
    job = load_job("math_async_disaggregated", environ={})
    assert job.cluster is not None
    assert job.topology is not None
    placement = HybridComponentPlacement(job.cluster, job.topology)
    assert placement.placement_mode.name.lower() == "disaggregated"
    sizes = {name: placement.get_world_size(name) for name in ("actor", "rollout", "reward")}
    assert sizes == {"actor": 16, "rollout": 64, "reward": 64}
    assert {
        node_group.env_configs[0].python_interpreter_path
        for node_group in job.cluster.node_groups
        if node_group.label == "4090"
    } == {"/opt/venv/vllm/bin/python3"}
    assert job.config is not None
    assert (job.config.runner.max_staleness, job.config.runner.partial_rollout) == (2, True)  # type: ignore[attr-defined]


here = partial(commit_of, fetches=True)
constants: Any = pytest.importorskip("huggingface_hub.constants")

OLD, NEW = "a" * 40, "b" * 40
MATH = """recipe: math
cluster:
  num_nodes: 1
  component_placement:
    actor,rollout,reward: {node_group: node, placement: 0}
"""
ROWS = b'{"prompt": "1+1=", "answer": "2"}\n'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    ask(monkeypatch, "http://127.0.0.1:9")
    return tmp_path / "cache"


def ask(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Let the client ask a server on loopback, as `HF_ENDPOINT` does from its import on."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def store(cache: Path, name: str, commit: str = OLD, *, ref: str = "main", **files: str) -> Path:
    """Lay a repository, `models--ORG--NAME`, into a cache as huggingface_hub does."""
    folder = cache / name / "snapshots" / commit
    for file, text in files.items():
        path = folder / file.replace("__", "/").replace("_json", ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (cache / name / "refs").mkdir(exist_ok=True)
    (cache / name / "refs" / ref).write_text(commit)
    return folder


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    "text",
    [
        "data/train.jsonl",
        "data/Train.PARQUET",
        "/data/models",
        "a/b/c",
        "./acme/tiny",
        "~/models",
        "gpt2",
        "acme/",
        "../x",
    ],
)
def test_what_has_another_shape_is_a_path(text: str) -> None:
    assert located(text, "dataset") == os.path.abspath(text)
    assert not isinstance(located(text, "dataset"), HubPath)


@pytest.mark.usefixtures("cache")
def test_what_is_a_url_stays_one() -> None:
    assert located("s3://acme/tiny", "model") == "s3://acme/tiny"


@pytest.mark.usefixtures("cache")
def test_a_folder_of_that_shape_wins_only_if_it_is_there(cache: Path, tmp_path: Path) -> None:
    folder = store(cache, "models--acme--tiny", config_json="{}")
    assert located("acme/tiny", "model") == str(folder)
    (tmp_path / "acme/tiny").mkdir(parents=True)
    assert located("acme/tiny", "model") == str(tmp_path / "acme/tiny")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("text", "kind", "commit", "inner"),
    [
        ("acme/tiny.v2-1B", "model", OLD, ""),
        ("acme/tiny.v2-1B@v1", "model", NEW, ""),
        (f"acme/tiny.v2-1B@{NEW}", "model", NEW, ""),
        ("hf://acme/tiny.v2-1B/sub", "model", OLD, "sub"),
        ("hf://datasets/acme/tiny.v2-1B@v1/main/train.jsonl", "dataset", NEW, "main/train.jsonl"),
    ],
)
def test_a_name_is_a_commit_in_the_cache(text: str, kind: Any, commit: str, inner: str, cache: Path) -> None:
    for form in ("models", "datasets"):
        store(cache, f"{form}--acme--tiny.v2-1B", config_json="{}")
        store(cache, f"{form}--acme--tiny.v2-1B", NEW, ref="v1", config_json="{}")
    path = located(text, kind)
    assert isinstance(path, HubPath)
    assert path == str(cache / f"{kind}s--acme--tiny.v2-1B/snapshots" / commit / inner).rstrip("/")
    assert located(path.pinned(commit), kind) == path


@pytest.mark.usefixtures("cache")
def test_a_worker_looks_into_its_own_cache(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(cache, "models--acme--tiny", config_json="{}")
    sent = pickle.dumps({"model": located("acme/tiny", "model")})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "theirs"))
    # There `main` is another commit, which is none of the job's.
    store(tmp_path / "theirs", "models--acme--tiny", NEW, config_json="{}")
    assert pickle.loads(sent)["model"] == str(tmp_path / "theirs/models--acme--tiny/snapshots" / OLD)


@pytest.mark.usefixtures("cache")
def test_the_commit_of_the_job_is_fetched_where_it_lacks(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served({"models/acme/tiny": (NEW, {"config.json": b"{}", "weights.bin": b"pickled"})}) as hub:
        ask(monkeypatch, hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # as `stay_offline` leaves it
        path = located(f"acme/tiny@{OLD}", "model")
        ensure_here(str(path))
        assert os.listdir(path) == ["config.json"]
        asked = len(hub.asked)
        ensure_here(path)
        assert len(hub.asked) == asked
        assert constants.HF_HUB_OFFLINE is True
    assert not any("weights.bin" in request for request in hub.asked)


@pytest.mark.usefixtures("cache")
def test_what_a_fetch_left_out_is_fetched(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that broke off leaves a folder with some of the files."""
    files = {"config.json": b"{}", "model-1.safetensors": b"one", "model-2.safetensors": b"two"}
    with served({"models/acme/tiny": (OLD, files)}) as hub:
        ask(monkeypatch, hub.url)
        path = located(f"acme/tiny@{OLD}", "model")
        ensure_here(path)
        os.unlink(f"{path}/model-2.safetensors")
        assert not located(f"acme/tiny@{OLD}", "model").is_here  # pyright: ignore[reportAttributeAccessIssue]
        ensure_here(path)
        assert sorted(os.listdir(path)) == sorted(files)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("offline", [True, False])
def test_without_cache_and_network_the_error_says_both_ways(offline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError) as caught:
        ensure_here(located(f"acme/tiny@{OLD}", "model"))
    assert "`acme/tiny` is not in the cache of huggingface_hub" in caught.value.message
    assert "cannot be fetched from http://127.0.0.1:9" in caught.value.message
    assert "`hf download acme/tiny`" in str(caught.value.help)
    assert "name a folder" in str(caught.value.help)


def job_of(text: str) -> Any:
    return load_with_lint("-", stdin=text.encode(), environ={})


KEYS = {
    "actor.model.model_path": "math",
    "actor.tokenizer.tokenizer_model": "math",
    "reference.model_path": "math",
    "critic.model_path": "math",
    "teacher.model_path": "math",
    "judge.model_path": "math",
    "data.train_data_paths": "math",
    "data.val_data_paths": "math",
}


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("key", [*KEYS, "sft:data.train_data_paths", "sft_chat:data.val_data_paths"])
def test_every_key_of_models_and_data_takes_a_name(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, _, key = key.rpartition(":")
    place = "actor" if recipe.startswith("sft") else "actor,rollout,reward"
    text = MATH.replace("recipe: math", f"recipe: {recipe or 'math'}").replace("actor,rollout,reward", place)

    def found() -> list[tuple[Severity, str]]:
        job = load_with_lint("-", (f"{key}=acme/thing",), stdin=text.encode(), environ={})
        at = tuple(key.split("."))
        about = [finding for finding in job.diagnostics if finding.path[: len(at)] == at]
        assert [finding.code for finding in about if "acme" in finding.message] == ["hub-name"], about
        return [
            (finding.severity, f"{finding.message} {finding.help}") for finding in about if finding.code == "hub-name"
        ]

    ((severity, said),) = found()
    assert severity is Severity.NOTE
    assert "a run fetches it from http://127.0.0.1:9" in said
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ((severity, said),) = found()
    assert severity is Severity.ERROR
    assert "name an existing folder, or run `hf download acme/thing" in said
    assert "HF_HUB_OFFLINE" in said


@pytest.mark.usefixtures("cache")
def test_data_of_a_name_are_its_files_of_that_part(cache: Path) -> None:
    folder = store(cache, "datasets--acme--sums", README="", main__train_json="", main__test_json="", info_json="{}")
    (folder / "main/train-1.jsonl").write_bytes(ROWS)
    (folder / "main/validation-1.jsonl").write_bytes(ROWS)
    job = job_of(MATH + "data: {train_data_paths: {path: acme/sums, weight: 2}, val_data_paths: [acme/sums]}\n")
    assert job.config.data.train_files == (str(folder / "main/train-1.jsonl"),)
    assert job.config.data.train_weights == (2,)
    assert job.config.data.val_data_paths == (str(folder / "main/validation-1.jsonl"),)
    assert not [finding for finding in job.diagnostics if "acme" in finding.message]
    assert pins_of([path for _, path in hub_paths(job.config)], job.tree, here) == (
        f"data.train_data_paths.path=acme/sums@{OLD}",
        f"data.val_data_paths[0]=acme/sums@{OLD}",
    )


@pytest.mark.usefixtures("cache")
def test_data_in_several_folders_have_to_be_chosen(cache: Path) -> None:
    folder = store(cache, "datasets--acme--sums", main__train_json="[]", socratic__train_json="[]")
    (error,) = [
        item for item in job_of(f"{MATH}data: {{train_data_paths: acme/sums}}\n").diagnostics if "acme" in item.message
    ]
    assert "in 2 folders: `main`, `socratic`" in error.message
    assert "hf://datasets/acme/sums/main" in str(error.help)
    chosen = located("hf://datasets/acme/sums/socratic", "dataset")
    assert files_of_part((chosen,), TRAINING) == (str(folder / "socratic/train.json"),)
    with pytest.raises(Exception, match="no files of rows for test"):
        files_of_part((chosen,), EVALUATION)


@pytest.mark.usefixtures("cache")
def test_a_run_and_those_that_go_on_have_one_commit(cache: Path, tmp_path: Path) -> None:
    store(cache, "models--acme--tiny", config_json="{}")
    text = MATH + "actor: {model: {model_path: acme/tiny}, tokenizer: {tokenizer_model: acme/tiny}}\n"
    first = job_of(text)
    paths = [path for _, path in hub_paths(first.config)]
    pins = pins_of(paths, first.tree, here)
    assert sorted(pins) == [
        f"actor.model.model_path=acme/tiny@{OLD}",
        f"actor.tokenizer.tokenizer_model=acme/tiny@{OLD}",
    ]
    run = load_with_lint("-", pins, stdin=text.encode(), environ={})
    assert pins_of([path for _, path in hub_paths(run.config)], run.tree, here) == ()
    # The author pushes, and another program fetches that.
    store(cache, "models--acme--tiny", NEW, config_json="{}")
    (tmp_path / "run/checkpoints/global_step_1").mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text(config_text_of(run))
    for resumed in ("run", "run/checkpoints", "run/checkpoints/global_step_1"):
        later = job_of(f"{text}runner: {{resume_dir: {tmp_path / resumed}}}\n")
        assert {path.commit for _, path in hub_paths(later.config)} == {OLD}
        assert pins_of([path for _, path in hub_paths(later.config)], later.tree, here) == ()
    assert {path.commit for _, path in hub_paths(job_of(text).config)} == {NEW}
    assert json.dumps(run.config.actor.model_dump(mode="json")).count(OLD) == 2


@pytest.mark.usefixtures("cache")
def test_a_name_is_fetched_once_and_known_without_a_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(MATH + "actor: {model: {model_path: acme/tiny}}\n")
    paths = [path for _, path in hub_paths(job.config)]
    with served({"models/acme/tiny": (NEW, {"config.json": b"{}"})}) as hub:
        ask(monkeypatch, hub.url)
        assert pins_of(paths, job.tree, partial(commit_of, fetches=False)) == (
            f"actor.model.model_path=acme/tiny@{NEW}",
        )
        assert not located("acme/tiny", "model").is_here  # pyright: ignore[reportAttributeAccessIssue]
        assert pins_of(paths, job.tree, here) == (f"actor.model.model_path=acme/tiny@{NEW}",)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert located("acme/tiny", "model") == str(cache / "models--acme--tiny/snapshots" / NEW)
    assert os.listdir(located("acme/tiny", "model")) == ["config.json"]


_PATHS = st.builds(
    lambda first, rest: (first, *rest), st.text(), st.lists(st.one_of(st.text(), st.integers(0, 10**9 - 1)))
)


@given(_PATHS)
def test_a_formatted_path_reads_back(path: TreePath) -> None:
    steps, end = parse_path(format_path(path))
    assert to_path(steps) == path
    assert end == len(format_path(path))


@given(_PATHS)
def test_a_formatted_path_ends_at_the_stop(path: TreePath) -> None:
    text = format_path(path)
    steps, end = parse_path(f"${{{text}}} and more", start=2, stop="}")
    assert to_path(steps) == path
    assert end == 2 + len(text)


@given(st.text(alphabet="ab.[]0=\"'\\ {}"))
def test_any_text_is_read_or_refused_inside_of_it(text: str) -> None:
    try:
        steps, end = parse_path(text, stop="=")
    except NotationError as error:
        refusal = error
    else:
        assert steps
        assert end == len(text) or text[end] == "="
        return
    assert 0 <= refusal.start <= refusal.end <= len(text) + 1


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("cluster.num_nodes", ("cluster", "num_nodes")),
        (
            "cluster.node_groups[0].env_configs[12].node_ranks",
            ("cluster", "node_groups", 0, "env_configs", 12, "node_ranks"),
        ),
        ("a[0][1]", ("a", 0, 1)),
        ("a.4090.b-c", ("a", "4090", "b-c")),
        ('p."actor,env"', ("p", "actor,env")),
        ("p.actor,env", ("p", "actor,env")),
        ("p.'a.b'", ("p", "a.b")),
        ('"say \\"x\\""', ('say "x"',)),
        ("p.'a\\b'", ("p", "a\\b")),
    ],
)
def test_forms(text: str, path: TreePath) -> None:
    assert to_path(parse_path(text)[0]) == path


def test_steps_know_their_place() -> None:
    text = 'ab."c.d"[7]'
    steps, _ = parse_path(text)
    assert [text[step.start : step.end] for step in steps] == ["ab", '"c.d"', "[7]"]


@pytest.mark.parametrize(
    ("text", "piece", "words"),
    [
        ("", "", "missing"),
        ("a..b", ".", "missing"),
        ("a.", "", "missing"),
        (".a", ".", "missing"),
        ("[0].a", "[", "starts with a name"),
        ("a.[0]", ".", "before the index"),
        ("a[x]", "[x]", "not the index"),
        ("a[-1]", "[-1]", "not the index"),
        ("a[1", "[1", "never closed"),
        ('a."b', '"b', "never closed"),
        ('"a\\x"', "\\x", "not an escape"),
        ("a b", " ", "is not valid here"),
        ("a. b", " ", "white space"),
        ("a.${b}", "{", "is not valid here"),
        ("a[99999999999]", "[99999999999]", "not the index"),
    ],
)
def test_what_is_refused_is_pointed_at(text: str, piece: str, words: str) -> None:
    with pytest.raises(NotationError, match=words) as caught:
        parse_path(text)
    assert text[caught.value.start : caught.value.end] == piece
