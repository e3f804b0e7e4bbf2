"""Saved weights on disk."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from recipes.language.listening.request_error import RequestError
from recipes.serve.service.weight_store import WeightStore

RUN = "ab12-cd34:train:0"


async def write(folder: str) -> None:
    (Path(folder) / "rlinf_adapter.json").write_text(json.dumps({"rank": 4, "seed": 1}))


async def fail(folder: str) -> None:
    await write(folder)
    raise ValueError("disk")


def store(folder: Path) -> WeightStore:
    return WeightStore(folder / "weights", folder / "sessions", "base")


def save(made: WeightStore, name: str, action: Any = write, **extra: Any) -> str:
    return asyncio.run(made.save("ann", RUN, "weights", name, action, **extra))


def test_saved_weights_are_found_by_their_path(tmp_path: Path) -> None:
    made = store(tmp_path)
    path = save(made, "one", metadata={"who": "ann"})
    assert path == f"tinker://{RUN}/weights/one"
    saved = made.find("ann", path)
    assert (saved.settings.rank, saved.base_model, saved.has_optimizer) == (4, "base", False)
    assert saved.metadata == {"who": "ann"}
    with pytest.raises(RequestError, match="there are no weights"):
        made.find("ben", path)


@pytest.mark.parametrize("name", ["rlinf_saved.json", "rlinf_adapter.json"])
@pytest.mark.parametrize("content", ["", "[]", "7", '{"rank": "4"}', '{"base_model": 1, "expires": "soon", "rank": 0}'])
def test_damaged_weights_are_told_and_kept(tmp_path: Path, name: str, content: str) -> None:
    made = store(tmp_path)
    path = save(made, "one")
    file = tmp_path / "weights/ann" / RUN / "weights/one" / name
    file.write_text(content)
    with pytest.raises(RequestError, match=f"are damaged: `{name}`"):
        made.find("ann", path)
    made.remove_expired()
    assert file.exists()


def test_failed_save_leaves_nothing(tmp_path: Path) -> None:
    made = store(tmp_path)
    save(made, "one", metadata={"number": 1})
    with pytest.raises(ValueError, match="disk"):
        save(made, "one", fail, overwrite=True)
    assert made.find("ann", f"tinker://{RUN}/weights/one").metadata == {"number": 1}
    assert [file.name for file in (tmp_path / "weights/ann" / RUN / "weights").iterdir()] == ["one"]


def test_name_is_taken_until_it_is_overwritten(tmp_path: Path) -> None:
    made = store(tmp_path)
    path = save(made, "one")
    with pytest.raises(RequestError, match="overwrite=True"):
        save(made, "one")
    save(made, "one", overwrite=True, metadata={"number": 2})
    assert made.find("ann", path).metadata == {"number": 2}


def test_expired_weights_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = store(tmp_path)
    paths = [save(made, "one", ttl=10), save(made, "two")]
    made.remove_expired()
    assert [made.find("ann", path).settings.rank for path in paths] == [4, 4]
    later = time.time() + 11
    monkeypatch.setattr(time, "time", lambda: later)
    made.remove_expired()
    assert made.find("ann", paths[1]).settings.rank == 4
    with pytest.raises(RequestError, match="there are no weights"):
        made.find("ann", paths[0])


@pytest.mark.parametrize(
    "path", [None, "", "weights/one", f"tinker://{RUN}/weights/../x", "tinker://../../x/weights/a"]
)
def test_path_of_another_form_is_refused(tmp_path: Path, path: Any) -> None:
    with pytest.raises(RequestError, match="a path of weights is"):
        store(tmp_path).find("ann", path)


def test_request_that_saved_before_is_answered_again(tmp_path: Path) -> None:
    made = store(tmp_path)
    path = save(made, "one", seq_id=3)
    assert save(made, "one", fail, seq_id=3) == path
    with pytest.raises(RequestError, match="overwrite=True"):
        save(made, "one", seq_id=4)
