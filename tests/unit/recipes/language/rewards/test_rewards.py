from __future__ import annotations

import sys
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.language.rewards.matching.cleaning import boxed_content
from recipes.language.rewards.matching.final_answer import answer_number
from recipes.language.rewards.matching.rules import RULES
from recipes.language.rewards.right_answers import gold_verdict
from recipes.language.rewards.scoring import Item, Scorer
from recipes.language.workers.reward_worker import overlong_penalty
from rlinf_core.errors import ConfigError

FUNCTIONS = """
import asyncio, os, signal, time

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

async def later(text, answer):
    return 0.5

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

def of_another_project(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "source": len(data_source), "extra": extra_info["n"]}

def everything(prompt, **others):
    return {"reward": len(prompt), "others": len(others)}

def part_that_is_nan(text):
    return {"reward": 1.0, "style": float("nan")}

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

def dies_once(text, row):
    from pathlib import Path
    mark = Path(row["mark"])
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0

def stops_once(text, row):
    from pathlib import Path
    mark = Path(row["mark"])
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0

def verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [{"score": float(s == g), "extra": e["n"]} for s, g, e in zip(solution_strs, ground_truths, extra_infos)]

def trl(prompts, completions, solution, **kwargs):
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [float(text == right) for text, right in zip(texts, solution)]

def trl_where_known(completions, solution):
    return [0.5 if right is None else float(text == right) for text, right in zip(completions, solution)]

def beyond_float32(text):
    return 10.0**39 if text == "float" else 10**400

def names_figures(text):
    return {"reward": 1.0, text: 2.0}

def trl_bare(completions):
    return [len(each) for each in completions]

def trl_short(completions):
    return [1.0]

def openrlhf(queries, prompts, labels):
    rewards = [float(query == prompt + label) for query, prompt, label in zip(queries, prompts, labels)]
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"length": [len(query) for query in queries]}}

def graded(text, answer):
    return {"score": 0.5, "acc": text == answer, "pred": text}

def unknown(response, target):
    return 1.0

def nothing_known():
    return 1.0

def by_position(text, answer, /):
    return 1.0

def mixed(queries, prompts, labels, solution_str):
    return 1.0

constant = 3
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module with reward functions."""
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_rewards"


@pytest.mark.parametrize(
    ("rule", "text", "answer", "right"),
    [
        ("exact", " 7\n", "7", 1),
        ("exact", "7.0", "7", 0),
        ("boxed", r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
        ("boxed", r"\boxed{1} no, \boxed{ 2 }", "2", 1),
        ("boxed", "2", "2", 0),
        ("number", "it is 1,234.50", "1234.5", 1),
        ("number", "3/4", "0.75", 1),
        ("number", "-2 or 2", "-2", 0),
        ("number", "nothing", "2", 0),
        ("number", "1/0", "2", 0),
        ("number", "1" * 5000, "2", 0),
        ("number", "1e999999999", "2", 0),
    ],
)
def test_rules(rule: str, text: str, answer: str, right: float) -> None:
    assert RULES[rule](text, answer).right == right


@given(st.fractions(max_denominator=1000))
def test_the_last_number_of_a_text_is_read_exactly(value: Fraction) -> None:
    number = answer_number(f"first 17, then {value}.")
    assert number is not None
    assert number.value == value


@given(st.text(alphabet="ab{}\\ boxed", max_size=40))
def test_what_is_boxed_has_matching_braces(text: str) -> None:
    result = boxed_content(text)
    if result is not None:
        assert result.count("{") == result.count("}")
        # A list of neighbouring boxes is joined by ", ", which this alphabet lacks.
        assert all(part in text for part in result.split(", "))


def test_right_and_wrong_answers_have_the_rewards_that_are_set() -> None:
    scorer = Scorer("exact", correct=2.0, incorrect=-1.0)

    assert scorer.score(Item(text="7", answer="7")).reward == 2.0
    assert scorer.score(Item(text="8", answer="7")).reward == -1.0


def test_an_answer_that_cannot_be_scored_costs_itself(functions: str) -> None:
    with Scorer(f"{functions}:score", incorrect=-1.0, timeout=1.0) as scorer:
        diagnostics = {
            text: scorer.score(Item(text=text, answer="", row={"style": 2}))
            for text in ("ab", "nan", "raise", "hang", "die", "wrong type", "abc")
        }

    assert (diagnostics["ab"].reward, diagnostics["abc"].reward) == (2.0, 3.0)
    assert diagnostics["abc"].parts == {"style": 2.0}
    # Another answer can be scored after each of them: the function works.
    failed = {text: score.exit for text, score in diagnostics.items() if score.exit}
    assert failed == {"nan": "error", "raise": "error", "hang": "time_limit", "die": "crash", "wrong type": "error"}
    assert all((diagnostics[text].reward, diagnostics[text].failure) == (-1.0, "") for text in failed)
    assert "no idea" in diagnostics["raise"].reason


def test_an_async_function_is_awaited(functions: str) -> None:
    with Scorer(f"{functions}:later") as scorer:
        assert scorer.score(Item(text="x", answer="")).reward == 0.5


def test_an_async_function_judges_all_answers_of_a_group_at_once(functions: str) -> None:
    with Scorer(f"{functions}:judge", timeout=20.0) as scorer:
        scores = scorer.score_all([Item(text="x" * n, answer="") for n in range(100)])

    assert [result.reward for result in scores] == list(range(100))
    assert scores[-1].parts == {"together": 100.0}


def test_a_function_gets_the_values_of_a_row_as_they_are(functions: str) -> None:
    row = {
        "due": date(2026, 1, 2),
        "at": datetime(2026, 1, 2, 7, tzinfo=UTC),
        "wait": timedelta(seconds=5),
        "price": Decimal("1.10"),
        "names": {3: "c"},
        "pair": (1, 2),
        "raw": b"\xff",
        "kinds": {"a"},
        "": [{"": 1}],
        "text": "x",
    }
    with Scorer(f"{functions}:of_row") as scorer:
        (score,) = scorer.score_all([Item(text="x", answer="", row=row)])
    assert (score.failure, score.reward) == ("", 1.0)


def test_array_of_one_number_is_a_reward(functions: str) -> None:
    with Scorer(f"{functions}:of_numpy") as scorer:
        one, two = scorer.score_all([Item(text=text, answer="") for text in ("1", "2")])
    assert (one.reward, one.failure) == (1.0, "")
    assert two.reason == "TypeError: `reward` is an array of shape [2], not a number"


def test_judge_that_was_away_is_asked_again(functions: str) -> None:
    with Scorer(f"{functions}:away_at_first", timeout=0.3, loading=0.3) as scorer:
        scores = scorer.score_all([Item(text=text, answer="") for text in ("a", "b")])
    assert [(score.reward, score.failure) for score in scores] == [(1.0, "")] * 2


@pytest.mark.parametrize(
    ("bad", "status"),
    [("hang", "time_limit"), pytest.param("block", "time_limit", marks=pytest.mark.nightly), ("die", "crash")],
)
def test_one_of_several_at_once_costs_itself(functions: str, bad: str, status: str) -> None:
    with Scorer(f"{functions}:judge", timeout=1.0, loading=1.0) as scorer:
        scores = scorer.score_all([Item(text=text, answer="") for text in ("a", "bb", bad, "dddd")])

    assert [(result.failure, result.exit) for result in scores] == [("", ""), ("", ""), ("", status), ("", "")]
    assert [result.reward for result in scores] == [1.0, 2.0, 0.0, 4.0]


@pytest.mark.parametrize("texts", [("raise",), ("ab", "raise"), ("ab", "raise", "nan")])
def test_a_function_that_fails_for_others_says_nothing(functions: str, texts: tuple[str, ...], tmp_path: Path) -> None:
    """As one does whose judge is away: at the last answer that it scored, or at the right one."""
    mark = tmp_path / "away"
    with Scorer(f"{functions}:of_a_judge", timeout=5.0) as scorer:
        for text in texts[:-1]:
            scorer.score(Item(text=text, answer="right", row={"away": str(mark)}))
        mark.touch()
        last = scorer.score(Item(text=texts[-1], answer="right", row={"away": str(mark)}))
    assert (last.failure, last.exit) == ("error", "")


def test_a_function_is_given_what_it_names(functions: str) -> None:
    item = Item(prompt="four", text="7", answer="7", row={"data_source": "abc", "n": 5})
    with Scorer(f"{functions}:of_another_project") as scorer:
        scored = scorer.score(item)
        assert (scored.reward, scored.parts) == (1.0, {"source": 3.0, "extra": 5.0})
    with Scorer(f"{functions}:everything") as scorer:
        scored = scorer.score(item)
        assert (scored.reward, scored.parts) == (4.0, {"others": 4.0})


def test_no_part_of_a_reward_is_nan(functions: str) -> None:
    with Scorer(f"{functions}:part_that_is_nan") as scorer:
        scored = scorer.score(Item(text="x", answer=""))
    assert (scored.reward, scored.failure, scored.parts) == (0.0, "error", {})


@pytest.mark.parametrize("name", ["stubborn", "in_c"])
def test_the_limit_holds_for_what_cannot_be_interrupted(functions: str, name: str) -> None:
    with Scorer(f"{functions}:{name}", timeout=0.5, loading=0.5) as scorer:
        assert scorer.score(Item(text="x", answer="")).failure == "timeout"


@pytest.mark.parametrize("name", ["nothing", "constant"])
def test_a_function_that_is_not_there_is_told_at_once(functions: str, name: str) -> None:
    with Scorer(f"{functions}:{name}") as scorer, pytest.raises(ConfigError, match="cannot be loaded"):
        scorer.score(Item(text="x", answer=""))


def test_expressions_are_compared_and_endless_ones_are_given_up() -> None:
    pytest.importorskip("math_verify")
    with Scorer("math", timeout=20.0) as scorer:
        assert scorer.score(Item(text=r"$\frac{2}{4}$", answer="1/2")).reward == 1
        assert scorer.score(Item(text="$x^2+2x+1$", answer="$(x+1)^2$")).reward == 1
        assert scorer.score(Item(text="$3$", answer="4")).reward == 0
    with Scorer("math", timeout=1.0) as scorer:
        for endless in ("$9^{9^{9^9}}$", "$10000000!$"):
            endless_score = scorer.score(Item(text=endless, answer="2+x"))
            assert (endless_score.failure, endless_score.exit) == ("", "time_limit")
            # The next one is scored, and has not to wait for another process.
            assert scorer.score(Item(text=r"$\frac{4}{2}+x$", answer="2+x")).reward == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    "endless",
    [
        "$9^{9^{9^9}}$",
        "$(1+x)^{100000}$",
        "$10000000!$",
        "$" + "+".join(map(str, range(20000))) + "$",
        "$" + "(" * 400 + "1" + ")" * 400 + "$",
        r"$\int_0^1 x^{x^{x^x}} dx$",
        r"$\sum_{n=1}^{10^{10}} \frac{1}{n^2}$",
        "$2^{2^{100}}$",
        r"$\binom{10^9}{10^8}$",
    ],
)
def test_no_expression_outlasts_the_limit(endless: str) -> None:
    pytest.importorskip("math_verify")
    with Scorer("math", timeout=1.0) as scorer:
        assert scorer.score(Item(text=endless, answer="2+x")).reward == 0
        assert scorer.score(Item(text=r"$\frac{4}{2}+x$", answer="2+x")).reward == 1


@pytest.mark.parametrize(
    ("text", "answer"),
    [("1,000", "1000.0"), ("2/4", "0.5"), (r"\boxed{7}", "7.0"), (r"\boxed{2,1}", "1,2"), (r"\boxed{(A)}", "A")],
)
def test_what_the_grammar_reads_needs_no_math_verify(text: str, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert RULES["math"](text, answer).right == 1


@pytest.mark.parametrize(("length", "penalty"), [(10, 0.0), (16, 0.0), (18, -0.5), (20, -1.0), (30, -1.0)])
def test_answers_near_their_limit_are_punished(length: int, penalty: float) -> None:
    assert overlong_penalty(length, limit=20, margin=4) == penalty


def test_what_a_function_loads_is_not_timed(functions: str, tmp_path: Path) -> None:
    slow = "import time\ntime.sleep(1.5)\ndef judge(text, answer):\n    return float(text == answer)\n"
    (tmp_path / "slow_to_import.py").write_text(slow)
    with Scorer(f"{functions}:lazy", timeout=0.4) as scorer:
        scores = scorer.score_all([Item(text="5", answer="5")] * 3)

    assert [(score.reward, score.failure) for score in scores] == [(1.0, "")] * 3


def test_half_an_import_judges_nothing(functions: str, tmp_path: Path) -> None:
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
    with Scorer(f"{functions}:lazy", timeout=0.5, loading=1.0) as scorer:
        scores = scorer.score_all([Item(text="5", answer="5")] * 3)

    assert [(score.failure, score.exit, score.reward) for score in scores] == [("", "", 1.0)] * 3


@pytest.mark.parametrize("name", ["dies_once", "stops_once"])
def test_an_answer_whose_process_is_lost_is_scored_once_more(functions: str, name: str, tmp_path: Path) -> None:
    row = {"mark": str(tmp_path / "mark")}
    with Scorer(f"{functions}:{name}", timeout=1.0, loading=1.0) as scorer:
        score = scorer.score(Item(text="5", answer="5", row=row))

    assert (score.reward, score.failure) == (1.0, "")


def test_foreign_reward_functions_are_called_as_at_home(functions: str) -> None:
    row = {"data_source": "gsm8k", "extra_info": {"n": 7}, "n": 9, "solution": "5"}
    items = [Item(prompt="2+3=", text=text, answer="5", row=row) for text in ("5", "6")]
    expected = {
        "of_another_project": [(1.0, {"source": 5.0, "extra": 7.0}), (0.0, {"source": 5.0, "extra": 7.0})],
        "verl_batch": [(1.0, {"extra": 7.0}), (0.0, {"extra": 7.0})],
        "trl": [(1.0, {}), (0.0, {})],
        "trl_bare": [(1.0, {}), (1.0, {})],
        "openrlhf": [(1.0, {"length": 5.0}), (0.0, {"length": 5.0})],
    }
    for name, verdicts in expected.items():
        with Scorer(f"{functions}:{name}") as scorer:
            scores = scorer.score_all(items)
        assert [(score.reward, dict(score.parts)) for score in scores] == verdicts, name


def test_columns_that_other_rows_have_are_none_for_trl(functions: str) -> None:
    items = [Item(text="5", answer="", row=row) for row in ({"solution": "5"}, {"prompt": "q"}, {"solution": "6"})]
    for order in (items, items[::-1]):
        with Scorer(f"{functions}:trl_where_known") as scorer:
            assert sorted(score.reward for score in scorer.score_all(order)) == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("kind", ["float", "integer"])
def test_a_reward_beyond_float32_is_none(functions: str, kind: str) -> None:
    with Scorer(f"{functions}:beyond_float32") as scorer:
        score = scorer.score(Item(text=kind, answer=""))
    assert score.failure == "error"
    assert "float32" in score.reason


@pytest.mark.parametrize("name", ["\x1b[2Jlength", "", "x" * 101, "two\nlines"])
def test_a_figure_has_a_name_that_can_be_printed(functions: str, name: str) -> None:
    with Scorer(f"{functions}:names_figures") as scorer:
        odd, plain = scorer.score(Item(text=name, answer="")), scorer.score(Item(text="length", answer=""))
    assert (odd.failure, dict(plain.parts)) == ("error", {"length": 2.0})
    assert "\x1b" not in odd.reason


def test_a_conversation_is_handed_to_trl_as_messages(functions: str) -> None:
    item = Item(text="5", answer="5", row={"solution": "5"}, messages=({"role": "user", "content": "2+3="},))
    with Scorer(f"{functions}:trl") as scorer:
        assert scorer.score(item).reward == 1.0


def test_a_list_of_another_length_is_no_reward(functions: str) -> None:
    """Each answer is judged by itself then, as after any failure of them all."""
    with Scorer(f"{functions}:trl_short") as scorer:
        scores = scorer.score_all([Item(text="a", answer=""), Item(text="b", answer="")])
    assert [score.reward for score in scores] == [1.0, 1.0]


@pytest.mark.parametrize("name", ["unknown", "nothing_known", "by_position", "mixed"])
def test_a_function_of_no_known_signature_is_refused(functions: str, name: str) -> None:
    with Scorer(f"{functions}:{name}") as scorer, pytest.raises(ConfigError) as caught:
        scorer.start()
    output = str(caught.value)
    assert name in output
    assert all(kind in output for kind in ("verl", "TRL", "OpenRLHF"))


def test_what_is_right_is_told_apart_from_its_reward(functions: str) -> None:
    with Scorer(f"{functions}:graded") as scorer:
        scores = scorer.score_all([Item(text="5", answer="5"), Item(text="6", answer="5")])

    assert [(score.reward, score.correct) for score in scores] == [(0.5, True), (0.5, False)]
    assert scores[0].reason == "by the function, 5"
    assert Scorer("exact", correct=0.2).score(Item(text="5", answer="5")).correct
    assert not Scorer("exact", incorrect=1.0).score(Item(text="6", answer="5")).correct


@pytest.mark.parametrize(
    ("rule", "answer", "reason"),
    [
        ("number", "(1,2)", "not a number"),
        ("number", "", "empty"),
        ("math", "", "empty"),
        ("math", "\\frac{", "cannot parse"),
        ("boxed", "  ", "empty"),
    ],
)
def test_a_right_answer_that_nothing_equals_is_told(rule: str, answer: str, reason: str) -> None:
    pytest.importorskip("math_verify")
    verdict = gold_verdict(rule, answer)
    assert verdict.right == 0
    assert reason in verdict.reason


def test_right_answers_are_right_by_their_own_rules() -> None:
    pytest.importorskip("math_verify")
    golds = ("5", "1,2", "\\$18.90", "(1,2)", "\\text{even}", "A", "x^2+1", "\\begin{pmatrix}1\\\\2\\end{pmatrix}")
    assert [gold for gold in golds if gold_verdict("math", gold).right != 1] == []
    assert gold_verdict("number", "She has 5.\n#### 5").right == 1
