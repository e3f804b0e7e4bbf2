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
from rlinf_cli.job.job_file import file_of_recipe, load_with_lint
from rlinf_core import ConfigError
from rlinf_core.config.composing.references import parse_path, to_path
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.sections.values import HubPath, commit_of, ensure_here, hub_paths, located, pins_of
from rlinf_core.config.shipped import renamed_configs, shipped_config, shipped_configs
from rlinf_core.config.tree import Path as TreePath
from rlinf_core.config.tree import format_path
from rlinf_core.job.find_recipe import find_recipe, recipe_names
from rlinf_core.job.load import load_job
from rlinf_core.placement.component import HybridComponentPlacement
from rlinf_core.runners.storage.run_folder import config_text_of
from tests.hub_stand_in import served


@pytest.mark.parametrize(("former", "now"), renamed_configs().items())
def test_names_of_the_release_before_are_read_and_renamed(
    former: str, now: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped_configs()[now] == shipped_config(former)
    for name in (former, f"configs/{former}.yaml"):
        assert (file_of_recipe(name, ()), capsys.readouterr().err) == (
            (now, ()),
            f"warning: the config `{name}` is now `{now}`\n",
        )
    Path(former).write_text("", encoding="utf-8")
    assert file_of_recipe(former, ()) == (former, ())


@pytest.mark.parametrize(
    ("former", "now"),
    [("libero_8gpu", "`embodied/libero-collocated-8gpu`"), ("serve_smollm.yaml", "`serve/sums-laptop actor.model")],
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
    job = load_job(f"embodied/libero-{mode}-8gpu", environ={})
    assert job.cluster is not None
    assert job.topology is not None
    placement = HybridComponentPlacement(job.cluster, job.topology)
    assert placement.placement_mode.name.lower() == mode


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


@pytest.fixture(autouse=True)
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


@pytest.mark.parametrize(
    "text",
    [
        "data/train.jsonl",
        "a/Train.PARQUET",
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
    assert located("s3://acme/tiny", "model") == "s3://acme/tiny"


def test_a_folder_of_that_shape_wins_only_if_it_is_there(cache: Path, tmp_path: Path) -> None:
    folder = store(cache, "models--acme--tiny", config_json="{}")
    assert located("acme/tiny", "model") == str(folder)
    (tmp_path / "acme/tiny").mkdir(parents=True)
    assert located("acme/tiny", "model") == str(tmp_path / "acme/tiny")


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


def test_a_worker_looks_into_its_own_cache(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(cache, "models--acme--tiny", config_json="{}")
    sent = pickle.dumps({"model": located("acme/tiny", "model")})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "theirs"))
    # There `main` is another commit, which is none of the job's.
    store(tmp_path / "theirs", "models--acme--tiny", NEW, config_json="{}")
    assert pickle.loads(sent)["model"] == str(tmp_path / "theirs/models--acme--tiny/snapshots" / OLD)


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


def job_of(text: str, *overrides: str) -> Any:
    return load_with_lint("-", overrides, stdin=text.encode(), environ={})


# Of recipe `math` where none is named.
KEYS = [
    *("actor.model.model_path", "actor.tokenizer.tokenizer_model", "reference.model_path", "critic.model_path"),
    *("teacher.model_path", "judge.model_path", "data.train_data_paths", "data.val_data_paths"),
    *("sft:data.train_data_paths", "sft_chat:data.val_data_paths"),
]


@pytest.mark.parametrize("key", KEYS)
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
