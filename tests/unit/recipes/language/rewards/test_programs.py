"""Programs as answers: what is read of an answer and of its tests, and their runs in the sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from recipes.language.answers.sequences import Score
from recipes.language.rewards.programs import ProgramJudge, ProgramTests, fault_of_tests, program_in
from recipes.language.rewards.right_answers import gold_verdict
from recipes.language.rewards.scoring import Item, Scorer
from recipes.language.sandbox import sandbox
from rlinf_core import ConfigError

TESTS = "assert double(2) == 4\nassert double(-1) == -2"
PAIRS = json.dumps({"inputs": ["2\n3\n", "5\n"], "outputs": ["4\n6", "10\n"]})


def block(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    try:
        sandbox.check()
    except ConfigError as error:
        pytest.skip(str(error))
    with Scorer("code", timeout=3.0) as made:
        yield made


def scored(scorer: Scorer, program: str, tests: str = TESTS) -> Score:
    return scorer.score(Item(text=block(program), answer=tests))


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\none\n```\n```text\nno\n```\n```py\ntwo\n```\n```python\nopen", "two\n"),
        ("```\nplain\n```", "plain\n"),
        ("`x = 1`", None),
        ("1. code:\n   ```python\n   if 1:\n       print(3)\n   ```\n", "if 1:\n    print(3)\n"),
        ("> ```py\n> print(3)\n> ```", "print(3)\n"),
        ("- ~~~python\n  print(3)\n  ~~~", "print(3)\n"),
        ("```python\nprint(3)```", "print(3)\n"),
        ("Here: ```python\nprint(3)\n```", "print(3)\n"),
        ("```python\nprint(3)\n```\nOutput:\n```\n4\n```", "print(3)\n"),
        ("```python\ndef f(x): return x\n```\nUse:\n```python\nprint(f(3))\n```", "def f(x): return x\n"),
        ("```\nprint(3)\n```\nOutput:\n```\n3 apples\n```", "print(3)\n"),
        ("<think>```python\nprint(9)\n```</think>```python\nprint(3)\n```", "print(3)\n"),
        ('````python\ns = """\n```\n"""\n````', 's = """\n```\n"""\n'),
        ("```python\nprint(3)  # no fence: ```\n```", "print(3)  # no fence: ```\n"),
    ],
)
def test_a_program_is_read_as_people_write_it(text: str, program: str | None) -> None:
    assert program_in(text) == program


def test_tests_are_python_or_pairs() -> None:
    assert gold_verdict("code", TESTS).right == 1.0
    assert ProgramTests.parsed(TESTS).statements == (TESTS,)
    assert ProgramTests.parsed(json.dumps(["assert f(1)", "assert f(2)"])).statements == ("assert f(1)", "assert f(2)")
    assert ProgramTests.parsed(PAIRS).pairs == (("2\n3\n", "4\n6"), ("5\n", "10\n"))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no tests"),
        ("[]", "no tests"),
        ("assert f(1", "not Python"),
        ('{"inputs": ["1"], "outputs": []}', "as many texts"),
        ('{"inputs": [1], "outputs": ["1"]}', "as many texts"),
        ('{"inputs": [], "outputs": [], "fn_name": "f"}', "as many calls"),
        ('{"inputs": [[1]], "outputs": [], "fn_name": "f"}', "as many calls"),
        # Python that asserts nothing: every program would pass it.
        ("{'inputs': ['1'], 'outputs': ['1']}", "the tests check nothing"),
        ('{"inputs": ["1"], "inputs": ["2"], "outputs": ["1"]}', "the tests check nothing"),
        ("['assert f(1)']", "the tests check nothing"),
        ('["x = 1"]', "the tests check nothing"),
        ("def check(candidate):\n    assert candidate(1) == 2\n", "the tests check nothing"),  # HumanEval
        ("(" * 5000, "not Python"),
    ],
)
def test_what_is_no_test_is_reported(text: str, fault: str) -> None:
    assert fault in fault_of_tests(text)
    assert gold_verdict("code", text).right == 0.0


def test_a_program_that_passes_is_right(scorer: Scorer) -> None:
    score = scored(scorer, "def double(x):\n    return 2 * x")
    assert (score.reward, score.correct, score.failure) == (1.0, True, "")
    assert dict(score.parts) == {"tests_passed": 1.0}


@pytest.mark.parametrize(
    ("program", "reason", "status"),
    [
        ("def double(x):\n    return x + 2", "AssertionError", ""),
        ("def double(x):\n    return x +", "SyntaxError", ""),
        ("def twice(x):\n    return 2 * x", "NameError", ""),
        ("import os\nos._exit(0)", "ended before its tests", None),
        ("import sys\nsys.exit(0)", "NameError", ""),
        ("def double(x):\n    raise SystemExit", "ended before its tests", None),
        ("import os\nos._exit(255)", "ended with status 255", None),
        ("import os\nos._exit(163)", "ended with status 163", None),
        ("open('/etc/hosts-of-mine', 'w')", "No such file", ""),
        ("x = 'a' * (1 << 30)", "MemoryError", "memory_limit"),
        ("while True: print('x' * 4096)", "wrote more than", "output_limit"),
        ("while True: pass", "", "time_limit"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "", "crash"),
        ("open('/tmp/full', 'wb').write(b'x' * (1 << 26))", "", None),
        ("import os\nwhile True: os.fork()", "", None),
    ],
)
def test_what_a_program_breaks_is_its_own_fault(scorer: Scorer, program: str, reason: str, status: str | None) -> None:
    score = scored(scorer, program)
    assert (score.correct, score.failure) == (False, "")
    assert reason in score.reason
    assert status in (score.exit, None)


def test_one_late_run_of_an_answer_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many would hold up the other answers, which share the processors."""
    ran: list[str] = []

    async def hanging(program: str, limits: sandbox.SandboxLimits, input: str) -> sandbox.ProgramResult:
        ran.append(program)
        return sandbox.ProgramResult(-signal.SIGKILL, "", "", flooded=False)

    monkeypatch.setattr(sandbox, "check", lambda: None)
    monkeypatch.setattr(sandbox, "run", hanging)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    judge = ProgramJudge(1.0, 256 << 20)
    tests = json.dumps({"inputs": ["1"] * 50, "outputs": ["1"] * 50})
    verdict = asyncio.run(judge.result_of(Item(text=block("x = 1"), answer=tests)))
    assert (verdict.right, verdict.exit, verdict.parts) == (0.0, "time_limit", {"tests_passed": 0.0})
    assert len(ran) <= 2


@pytest.mark.parametrize(
    ("program", "text", "output", "right"),
    [
        ("print(5)\nexit()", "", "5", True),
        ("print(5)\nquit(0)", "", "5", True),
        ("print(5)\nexit(3)", "", "5", False),
        ("print(10 ** 5000)", "", "1" + "0" * 5000, True),
        ("print('%.6f' % (1 / 3))", "", "0.333333333333", True),
        ("print(4 / 2)", "", "2", True),
        ("print(1e-9)", "", "0.000000001", True),
        ("print(1.01)", "", "1.0", False),
        ("print(10 ** 20 + 1)", "", "1" + "0" * 20, False),
        ("print(float('nan'))", "", "1.0", False),
        ("print(1)", "", "1\n2", False),
        ("print(1, 2)", "", "1", False),
    ],
)
def test_outputs_compare_as_numbers(scorer: Scorer, program: str, text: str, output: str, *, right: bool) -> None:
    tests = json.dumps({"inputs": [text], "outputs": [output]})
    assert scored(scorer, program, tests).correct is right


@pytest.mark.parametrize(
    ("inputs", "outputs"), [([[1, 2], [3, 4]], [3, 7]), (["1\n2", "3\n4"], ["3", "7"]), ([[1, 2]], [[3]])]
)
def test_a_function_is_tested_by_its_name(scorer: Scorer, inputs: list[object], outputs: list[object]) -> None:
    tests = json.dumps({"fn_name": "add", "inputs": inputs, "outputs": outputs})
    assert scored(scorer, "def add(a, b): return a + b", tests).correct
    assert scored(scorer, "class Solution:\n    def add(self, a, b): return a + b", tests).correct
    assert not scored(scorer, "def add(a, b): return a - b", tests).correct
    assert not scored(scorer, "def plus(a, b): return a + b", tests).correct


def test_a_function_may_use_what_livecodebench_imports(scorer: Scorer) -> None:
    body = "count = Counter(xs)\n        return max(count) if gcd(4, 6) == 2 else math.inf"
    program = f"class Solution:\n    def count(self, xs: List[int]) -> Optional[int]:\n        {body}"
    tests = json.dumps({"fn_name": "count", "inputs": [[[1, 3, 2]]], "outputs": [3]})
    assert scored(scorer, program, tests).reason == "passed all of 1 tests"
    assert not scored(scorer, program.replace("List", "Lists"), tests).correct
    deep = "def count(xs): return count(xs[1:]) if len(xs) > 1 else 3"
    far = json.dumps({"fn_name": "count", "inputs": [[list(range(3000))]], "outputs": [3]})
    assert scored(scorer, deep, far).reason == "passed all of 1 tests"


def test_an_answer_without_a_program_is_wrong(scorer: Scorer) -> None:
    score = scorer.score(Item(text="def double(x): return 2 * x", answer=TESTS))
    assert (score.correct, score.failure) == (False, "")
    assert "block of Python" in score.reason


def test_programs_are_held_against_pairs(scorer: Scorer) -> None:
    lines = "import sys\nfor line in sys.stdin: print(2 * int(line))"
    assert scored(scorer, lines, PAIRS).correct
    assert scored(scorer, "print(2 * int(input()))\nprint(6)", PAIRS).parts == {"tests_passed": 0.5}
    raw = "import os\nprint(*(2 * int(x) for x in os.read(0, 100).split()), sep='\\n')"
    assert scored(scorer, raw, PAIRS).correct


def test_a_group_is_scored_together_and_again(scorer: Scorer) -> None:
    right, wrong = (Item(text=block(f"def double(x):\n    return {x}"), answer=TESTS) for x in ("x + x", "x"))
    for _ in range(2):
        assert [score.correct for score in scorer.score_all([right, wrong] * 3)] == [True, False] * 3


def test_a_sandbox_that_cannot_be_made_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(program: str, limits: sandbox.SandboxLimits, input: str) -> sandbox.ProgramResult:
        raise sandbox.SandboxError("no room for another process")

    monkeypatch.setattr(sandbox, "check", lambda: None)
    monkeypatch.setattr(sandbox, "run", broken)
    judge = ProgramJudge(1.0, 256 << 20)
    with pytest.raises(sandbox.SandboxError, match="no room"):
        asyncio.run(judge.result_of(Item(text=block("x = 1"), answer=TESTS)))


def test_a_machine_without_a_sandbox_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with Scorer("code", settings={"memory": 256 << 20}) as made, pytest.raises(ConfigError, match="code") as info:
        made.start()
    assert "no sandbox" in str(info.value.why)


PROGRAMS: Final = Path(__file__).parents[4] / "data" / "answers" / "programs.jsonl"


def programs(kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in PROGRAMS.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["kind"] == kind]


def rewards(scorer: Scorer, rows: list[dict[str, Any]]) -> dict[str, float | str]:
    items = [Item(text=f"```python\n{row['program']}\n```", answer=row["tests"]) for row in rows]
    scores = scorer.score_all(items)
    return {row["name"]: score.failure or score.reward for row, score in zip(rows, scores, strict=True)}


def test_no_forgery_earns_a_reward(scorer: Scorer) -> None:
    forged = programs("forged")
    assert len(forged) >= 40
    assert {name: reward for name, reward in rewards(scorer, forged).items() if reward != 0} == {}


def test_honest_programs_pass_tests_of_objects_and_functions(scorer: Scorer) -> None:
    assert {name: reward for name, reward in rewards(scorer, programs("honest")).items() if reward != 1} == {}
