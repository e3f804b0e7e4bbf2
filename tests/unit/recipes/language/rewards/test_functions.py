"""Reward functions in their process: what they may take and return, and how they fail."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.language.answers.sequences import Score
from recipes.language.data.problem_sources import read_file
from recipes.language.rewards.functions import Signature, detect_convention, signature_in_source
from recipes.language.rewards.scoring import Item, Scorer, item_of
from rlinf_core.errors import ConfigError
from tests.unit.recipes.language import own_verdicts

Scored = Callable[..., list[Score]]

FUNCTIONS = """
import asyncio, os, signal, subprocess, sys, time

def score(text, answer, row):
    print("printed by the function")
    if text == "nan":
        return float("nan")
    if text == "raise":
        raise RuntimeError("no idea")
    if text == "hang":
        time.sleep(1000)
    if text == "die":
        os._exit(3)
    if text == "wrong type":
        return {"style": 1}
    return {"reward": len(text), "style": row.get("style", 0)}

def of_row(row):
    import datetime, decimal
    due, price, names, pair = row["due"], row["price"], row["names"], row["pair"]
    return bool(
        due.year == 2026 and type(due) is datetime.date and price == decimal.Decimal("1.10") and names[3] == "c"
        and pair == (1, 2) and row["raw"] == b"\\xff" and row["wait"].seconds == 5 and row["at"].hour == 7
        and row["kinds"] == {"a"} and row[""] == [{"": 1}] and row["text"] == "x"
    )

def of_numpy(text):
    import numpy as np
    return np.ones(int(text))

def of_plain_values(row): return float([type(value).__name__ for value in row.values()] == ["float", "datetime"])

def of_a_judge(text, row):
    if os.path.exists(row["away"]):
        raise ConnectionError("the judge is away")
    return score(text, "", {})

asked = set()

async def away_at_first(text):
    if text not in asked:
        asked.add(text)
        await asyncio.sleep(1000)
    return 1.0

async def later(text, answer): return 0.5

running = peak = 0

async def judge(text):
    global running, peak
    running += 1
    peak = max(peak, running)
    await asyncio.sleep(0.3)
    if text == "hang":
        await asyncio.sleep(1000)
    if text == "block":
        time.sleep(1000)
    if text == "die":
        os._exit(3)
    return {"reward": len(text), "together": peak}

one_at_a_time = asyncio.Semaphore(1)

async def limited(text):
    async with one_at_a_time:
        await asyncio.sleep(0.01)
    return len(text)

async def limited_lists(completions):
    return await asyncio.gather(*map(limited, completions))

def of_another_project(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "source": len(data_source), "extra": extra_info["n"]}

def everything(prompt, **others): return {"reward": len(prompt), "others": len(others)}
def part_that_is_nan(text): return {"reward": 1.0, "style": float("nan")}
def stubborn(text):
    while True:
        try:
            time.sleep(1000)
        except Exception:
            pass

def in_c(text):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(1000)

def lazy(text, answer):
    from slow_to_import import judge
    return judge(text, answer)

def lost_once(text, row):
    if not os.path.exists(row["mark"]):
        open(row["mark"], "w").close()
        os.kill(os.getpid(), row["signal"])
    return 1.0

def verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [{"score": float(s == g), "extra": e["n"]} for s, g, e in zip(solution_strs, ground_truths, extra_infos)]

def trl(prompts, completions, solution, **kwargs):
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [float(text == right) for text, right in zip(texts, solution)]

def trl_where_known(completions, solution):
    return [0.5 if right is None else float(text == right) for text, right in zip(completions, solution)]

def runs_program(text):
    program = "import sys; print(len(sys.stdin.read()))"
    read = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return {"reward": 1.0, "read": int(read.stdout) + len(sys.stdin.read())}

def verl_number(solution_str, ground_truth): return float(int(solution_str) == ground_truth)
def verl_numbers(solution_strs, ground_truths): return list(map(verl_number, solution_strs, ground_truths))
def trl_number(completions, ground_truth): return [float(int(c) == g) for c, g in zip(completions, ground_truth)]
def openrlhf_number(queries, prompts, labels): return [float(int(q) == g) for q, g in zip(queries, labels)]
def beyond_float32(text): return 10.0**39 if text == "float" else 10**400
def names_figures(text): return {"reward": 1.0, text: 2.0}
def trl_bare(completions): return [len(each) for each in completions]
def of_group(completions): return [len(completions) if each != "nan" else float("nan") for each in completions]
def trl_short(completions): return [1.0]
def openrlhf(queries, prompts, labels):
    rewards = [float(query == prompt + label) for query, prompt, label in zip(queries, prompts, labels)]
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"length": [len(query) for query in queries]}}

def graded(text, answer): return {"score": 0.5, "acc": text == answer, "pred": text, "parts": [text]}
def graded_in_part(solution_str, ground_truth):
    share = len(set(solution_str) & set(ground_truth)) / len(ground_truth)
    return {"score": share, "acc": share}

def unknown(response, target): return 1.0

constant = 3
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module with reward functions."""
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_rewards"


@pytest.fixture
def scored(functions: str) -> Scored:
    """Scores texts, or items, by a function."""

    def of(name: str, *asked: str | Item, **options: Any) -> list[Score]:
        items = [Item(text=one, answer="") if isinstance(one, str) else one for one in asked]
        with Scorer(f"{functions}:{name}", **options) as scorer:
            return scorer.score_all(items)

    return of


def test_an_answer_that_cannot_be_scored_costs_itself(functions: str) -> None:
    texts = ("ab", "nan", "raise", "hang", "die", "wrong type", "abc")
    with Scorer(f"{functions}:score", incorrect=-1.0, timeout=1.0) as scorer:
        scores = {text: scorer.score(Item(text=text, answer="", row={"style": 2})) for text in texts}
    assert (scores["ab"].reward, scores["abc"].reward, scores["abc"].parts) == (2.0, 3.0, {"style": 2.0})
    # Another answer can be scored after each of them: the function works.
    failed = {text: score.exit for text, score in scores.items() if score.exit}
    assert failed == {"nan": "error", "raise": "error", "hang": "time_limit", "die": "crash", "wrong type": "error"}
    assert all((scores[text].reward, scores[text].failure) == (-1.0, "") for text in failed)
    assert "no idea" in scores["raise"].reason


def test_an_async_function_judges_all_answers_of_a_group_at_once(scored: Scored) -> None:
    scores = scored("judge", *("x" * n for n in range(100)), timeout=20.0)
    assert [result.reward for result in scores] == list(range(100))
    assert scores[-1].parts == {"together": 100.0}


def test_a_result_that_is_no_number_leaves_others_as_they_are(scored: Scored) -> None:
    first, bad, last = scored("of_group", "a", "nan", "b")
    assert [(score.reward, score.exit) for score in (first, bad, last)] == [(3.0, ""), (0.0, "error"), (3.0, "")]


@pytest.mark.parametrize("name", ["limited", "limited_lists"])
def test_all_groups_share_an_event_loop(functions: str, name: str) -> None:
    """A semaphore or a client of the module belongs to the loop in which it was first used."""
    with Scorer(f"{functions}:{name}") as scorer:
        for _ in range(2):
            scores = scorer.score_all([Item(text="x" * number, answer="") for number in range(4)])
            assert [(score.reward, score.exit) for score in scores] == [(number, "") for number in range(4)]


def test_a_function_gets_floats_and_times_of_plain_types(scored: Scored) -> None:
    """Those of a YAML file and of numpy are of subclasses, which a function's interpreter may not have."""

    class Time(datetime):
        pass

    row = {"share": np.float64(0.5), "at": Time(2026, 1, 2, tzinfo=UTC)}
    (score,) = scored("of_plain_values", Item(text="x", answer="", row=row))
    assert (score.failure, score.reward) == ("", 1.0)


def test_a_function_gets_the_values_of_a_row_as_they_are(scored: Scored) -> None:
    row = {"due": date(2026, 1, 2), "at": datetime(2026, 1, 2, 7, tzinfo=UTC), "wait": timedelta(seconds=5)}
    row |= {"price": Decimal("1.10"), "names": {3: "c"}, "pair": (1, 2), "raw": b"\xff", "kinds": {"a"}}
    (score,) = scored("of_row", Item(text="x", answer="", row={**row, "": [{"": 1}], "text": "x"}))
    assert (score.failure, score.reward) == ("", 1.0)


ROW = {"data_source": "abc", "n": 5, "solution": "5"}
ASKED = ({"role": "user", "content": "2+3="},)


@pytest.mark.parametrize(
    ("name", "item", "reward", "parts", "reason"),
    [
        ("of_another_project", Item(text="7", answer="7", row=ROW), 1.0, {"source": 3.0, "extra": 5.0}, ""),
        ("everything", Item(prompt="four", text="7", answer="7", row=ROW), 4.0, {"others": 4.0}, ""),
        ("later", Item(text="7", answer="7"), 0.5, {}, ""),
        pytest.param("trl", Item(text="5", answer="5", row=ROW, messages=ASKED), 1.0, {}, "", id="a conversation"),
        ("of_numpy", Item(text="1", answer=""), 1.0, {}, ""),
        ("of_numpy", Item(text="2", answer=""), 0.0, {}, "TypeError: `reward` is an array of shape [2], not a number"),
        ("part_that_is_nan", Item(text="x", answer=""), 0.0, {}, "style"),
        ("beyond_float32", Item(text="float", answer=""), 0.0, {}, "float32"),
        ("beyond_float32", Item(text="integer", answer=""), 0.0, {}, "float32"),
    ],
)
def test_what_a_function_gets_and_may_return(
    scored: Scored, name: str, item: Item, reward: float, parts: dict[str, float], reason: str
) -> None:
    (score,) = scored(name, item)
    assert (score.reward, dict(score.parts), score.failure) == (reward, parts, "error" if reason else "")
    assert reason in score.reason


def test_judge_that_was_away_is_asked_again(scored: Scored) -> None:
    scores = scored("away_at_first", "a", "b", timeout=0.3, loading=0.3)
    assert [(score.reward, score.failure) for score in scores] == [(1.0, "")] * 2


@pytest.mark.parametrize(
    ("bad", "status"),
    [("hang", "time_limit"), pytest.param("block", "time_limit", marks=pytest.mark.nightly), ("die", "crash")],
)
def test_one_of_several_at_once_costs_itself(scored: Scored, bad: str, status: str) -> None:
    scores = scored("judge", "a", "bb", bad, "dddd", timeout=1.0, loading=1.0)
    assert [(result.failure, result.exit) for result in scores] == [("", ""), ("", ""), ("", status), ("", "")]
    assert [result.reward for result in scores] == [1.0, 2.0, 0.0, 4.0]


@pytest.mark.parametrize("texts", [("raise",), ("ab", "raise"), ("ab", "raise", "nan")])
def test_a_function_that_fails_for_others_says_nothing(functions: str, texts: tuple[str, ...], tmp_path: Path) -> None:
    """As one does whose judge is away: at the last answer that it scored, or at the right one."""
    mark = tmp_path / "away"
    items = [Item(text=text, answer="right", row={"away": str(mark)}) for text in texts]
    with Scorer(f"{functions}:of_a_judge", timeout=5.0) as scorer:
        for item in items[:-1]:
            scorer.score(item)
        mark.touch()
        last = scorer.score(items[-1])
    assert (last.failure, last.exit) == ("error", "")


@pytest.mark.parametrize("name", ["stubborn", "in_c"])
def test_the_limit_holds_for_what_cannot_be_interrupted(scored: Scored, name: str) -> None:
    assert [score.failure for score in scored(name, "x", timeout=0.5, loading=0.5)] == ["timeout"]


@pytest.mark.parametrize("name", ["nothing", "constant"])
def test_a_function_that_is_not_there_is_told_at_once(scored: Scored, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        scored(name, "x")


def test_what_a_function_loads_is_not_timed(scored: Scored, tmp_path: Path) -> None:
    slow = "import time\ntime.sleep(1.5)\ndef judge(text, answer):\n    return float(text == answer)\n"
    (tmp_path / "slow_to_import.py").write_text(slow)
    scores = scored("lazy", *[Item(text="5", answer="5")] * 3, timeout=0.4)
    assert [(score.reward, score.failure) for score in scores] == [(1.0, "")] * 3


def test_half_an_import_judges_nothing(scored: Scored, tmp_path: Path) -> None:
    """A time-out during an import ends the process; the next one imports the whole module."""
    slow = f"""
import pathlib, time
mark = pathlib.Path({str(tmp_path / "mark")!r})
if not mark.exists():
    mark.touch()
    time.sleep(1000)
def judge(text, answer):
    return float(text == answer)
"""
    (tmp_path / "slow_to_import.py").write_text(slow)
    scores = scored("lazy", *[Item(text="5", answer="5")] * 3, timeout=0.5, loading=1.0)
    assert [(score.failure, score.exit, score.reward) for score in scores] == [("", "", 1.0)] * 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_answer_whose_process_is_lost_is_scored_once_more(scored: Scored, number: int, tmp_path: Path) -> None:
    row = {"mark": str(tmp_path / "mark"), "signal": int(number)}
    (score,) = scored("lost_once", Item(text="5", answer="5", row=row), timeout=1.0, loading=1.0)
    assert (score.reward, score.failure) == (1.0, "")


def test_a_function_that_fails_once_is_asked_again(tmp_path: Path) -> None:
    with Scorer(f"{own_verdicts.__name__}:once_away") as scorer:
        score = scorer.score(Item(text="x", answer="", row={"seen": str(tmp_path / "seen")}))
    assert (score.reward, score.failure) == (1.0, "")


@pytest.mark.parametrize(
    ("name", "cause", "words"),
    [("always_away", "error", "away"), ("kills_itself", "crash", "exit code -9"), ("exits", "crash", "exit code 3")],
)
def test_what_fails_again_is_no_score(name: str, cause: str, words: str) -> None:
    with Scorer(f"{own_verdicts.__name__}:{name}") as scorer:
        scores = scorer.score_all([Item(text=text, answer="") for text in "xy"])
    assert [(score.failure, score.failed) for score in scores] == [(cause, True)] * 2
    assert all(words in score.reason for score in scores)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("of_another_project", (1.0, {"source": 5.0, "extra": 7.0}), (0.0, {"source": 5.0, "extra": 7.0})),
        ("verl_batch", (1.0, {"extra": 7.0}), (0.0, {"extra": 7.0})),
        ("trl", (1.0, {}), (0.0, {})),
        ("trl_bare", (1.0, {}), (1.0, {})),
        ("openrlhf", (1.0, {"length": 5.0}), (0.0, {"length": 5.0})),
    ],
)
def test_foreign_reward_functions_are_called_as_at_home(scored: Scored, name: str, right: Any, wrong: Any) -> None:
    row = {"data_source": "gsm8k", "extra_info": {"n": 7}, "n": 9, "solution": "5"}
    scores = scored(name, *(Item(prompt="2+3=", text=text, answer="5", row=row) for text in ("5", "6")))
    assert [(score.reward, dict(score.parts)) for score in scores] == [right, wrong]


def test_a_function_and_its_programs_have_no_standard_input(scored: Scored) -> None:
    assert [dict(score.parts) for score in scored("runs_program", "a", "b", timeout=30.0)] == [{"read": 0.0}] * 2


@pytest.mark.parametrize("name", ["verl_number", "verl_numbers", "trl_number", "openrlhf_number"])
def test_foreign_functions_get_the_right_answer_as_in_the_file(scored: Scored, name: str, tmp_path: Path) -> None:
    path = tmp_path / "numbers.jsonl"
    path.write_text('{"prompt": "2+3=", "reward_model": {"ground_truth": 5}}')
    problem = replace(read_file(str(path), "prompt", "reward_model.ground_truth")[0], prompt="")
    assert [score.reward for score in scored(name, *(item_of(problem, text) for text in "56"))] == [1.0, 0.0]


def test_columns_that_other_rows_have_are_none_for_trl(scored: Scored) -> None:
    items = [Item(text="5", answer="", row=row) for row in ({"solution": "5"}, {"prompt": "q"}, {"solution": "6"})]
    for order in (items, items[::-1]):
        assert sorted(score.reward for score in scored("trl_where_known", *order)) == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("name", ["\x1b[2Jlength", "", "x" * 101, "two\nlines"])
def test_a_figure_has_a_name_that_can_be_printed(functions: str, name: str) -> None:
    with Scorer(f"{functions}:names_figures") as scorer:
        odd, plain = scorer.score(Item(text=name, answer="")), scorer.score(Item(text="length", answer=""))
    assert (odd.failure, dict(plain.parts)) == ("error", {"length": 2.0})
    assert "\x1b" not in odd.reason


def test_a_list_of_another_length_is_no_reward(scored: Scored) -> None:
    """Each answer is judged by itself then, as after any failure of them all."""
    assert [score.reward for score in scored("trl_short", "a", "b")] == [1.0, 1.0]


def test_what_is_right_is_told_apart_from_its_reward(scored: Scored) -> None:
    scores = scored("graded", *(Item(text=text, answer="5") for text in ("5", "6")))
    assert [(score.reward, score.correct) for score in scores] == [(0.5, True), (0.5, False)]
    assert scores[0].reason == "by the function, 5, ['5']"
    scores = scored("graded_in_part", *(Item(text=text, answer="ab") for text in ("ab", "a", "c")))
    assert [(score.reward, score.correct) for score in scores] == [(1.0, True), (0.5, False), (0.0, False)]
    assert Scorer("exact", correct=0.2).score(Item(text="5", answer="5")).correct
    assert not Scorer("exact", incorrect=1.0).score(Item(text="6", answer="5")).correct


SOURCE = """
import functools
from os.path import join as imported

def ours(text, answer, *, strict=False): ...
async def judge(text, **others): ...
def verl(data_source, solution_str, ground_truth, extra_info=None, **kwargs): ...
def verl_batch(data_sources, solution_strs, ground_truths, extra_infos): ...
def trl(completions, solution, **kwargs): ...
def openrlhf(queries, prompts, labels, **kwargs): ...
def unknown(response, target):
    unknown = 1.0
    return unknown
def wants_more(text, answer, tokenizer): ...
def nothing(): ...
def positional(text, /): ...
def mixed(queries, prompts, labels, solution_str): ...

@functools.cache
def decorated(anything): ...

def twice(text): ...
twice = functools.partial(twice)

raise SystemExit("this module was imported")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module that cannot be imported without an end."""
    (tmp_path / "read_only_rewards.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return "read_only_rewards"


CONVENTIONS = {"ours": "ours", "judge": "ours", "verl": "verl", "verl_batch": "verl batch", "trl": "trl"}


@pytest.mark.parametrize(("name", "convention"), [*CONVENTIONS.items(), ("openrlhf", "openrlhf")])
def test_conventions_are_told_from_the_source(module: str, name: str, convention: str) -> None:
    signature = signature_in_source(f"{module}:{name}")
    assert signature is not None
    assert detect_convention(signature, name) == convention


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("unknown", "`response`"),
        ("wants_more", "`tokenizer`"),
        ("nothing", "takes none"),
        ("positional", "positional-only"),
        ("mixed", "`solution_str`"),
    ],
)
def test_other_signatures_are_refused_with_those_that_are_known(module: str, name: str, why: str) -> None:
    signature = signature_in_source(f"{module}:{name}")
    assert signature is not None
    with pytest.raises(ConfigError) as caught:
        detect_convention(signature, name)
    output = str(caught.value)
    assert why in output
    assert all(kind in output for kind in (name, "verl", "TRL", "OpenRLHF", "completions"))


def test_a_function_of_no_known_signature_is_refused(functions: str) -> None:
    with Scorer(f"{functions}:unknown") as scorer, pytest.raises(ConfigError, match="`response`"):
        scorer.start()


@pytest.mark.parametrize("name", ["decorated", "twice", "imported", "missing"])
def test_what_the_source_does_not_say_is_left_to_the_start(module: str, name: str) -> None:
    assert signature_in_source(f"{module}:{name}") is None


def test_the_object_and_its_source_have_one_signature(module: str) -> None:
    scope: dict[str, object] = {}
    exec(SOURCE.partition("raise SystemExit")[0], scope)  # noqa: S102  the source is above
    for name in ("ours", "judge", "verl", "trl", "nothing", "positional"):
        function = scope[name]
        assert callable(function)
        assert Signature.of(function) == signature_in_source(f"{module}:{name}")
