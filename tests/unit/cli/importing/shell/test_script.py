"""The command line inside a shell script: what is followed, and what is never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_cli.importing.shell.grammar import ScriptError
from rlinf_cli.importing.shell.script import find_launch


def words(script: str, environ: dict[str, str] | None = None) -> list[str]:
    """Return the arguments of the job in a script."""
    launch = find_launch(script, environ or {}, lambda word: word == "a.job")
    assert launch is not None
    return list(launch.words)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("python -m a.job x=1 \\\n  y='a b' \"z=$HOME/d\"\n", ["x=1", "y=a b", "z=${oc.env:HOME}/d"]),
        ("N=3\npython -m a.job n=$N m=${M:-4} o=$((N * 2 - 1))\n", ["n=3", "m=4", "o=5"]),
        ("python -m a.job $((-7 / 2)) $((7 / -2)) $((-7 % 2)) $((7 % -2))\n", ["-3", "-3", "-1", "1"]),
        ('A=(x=1\n # no\n \'y=[1, 2]\')\nA+=(z=3)\npython -m a.job "${A[@]}" "$@"\n', ["x=1", "y=[1, 2]", "z=3"]),
        ('A=()\npython -m a.job "${A[@]}" x=1 > log 2>&1 | tee f\n', ["x=1"]),
        ("S='x=1 y=2'\npython -m a.job $S \"$S\"\n", ["x=1", "y=2", "x=1 y=2"]),
        ('if [ "$D" = npu ]; then\n n=1\nelif [ 2 -gt 1 ] && [ -n x ]; then\n n=2\nfi\npython -m a.job n=$n', ["n=2"]),
        ('D=gpu\ncase "$D" in\n gpu | npu) n=1 ;;\n *) exit 1 ;;\nesac\npython -m a.job n=$n\n', ["n=1"]),
        ("for s in a b; do n=$s; done\npython -m a.job n=$n\n", ["n=b"]),
        ("cat > f << EOF\nexit 1\nEOF\npython -m a.job\n", []),
        ("D=${D:-$(python3 -c 'import t' 2>/dev/null && echo npu || echo gpu)}\npython -m a.job d=$D\n", ["d=gpu"]),
        ("python -m a.job t=$(date +%Y) u=$(whoami)\n", ["t=${now:%Y}", "u=???"]),
        ("(( 4 % 3 == 1 )) && n=1\npython -m a.job n=$n # c=1\n", ["n=1"]),
        ("python -m a.job f=${X:+y}${HOME:+set} g=${#N} h=${N?no}\n", ["f=", "g=0", "h=${oc.env:N}"]),
    ],
)
def test_words_are_those_of_the_shell(script: str, expected: list[str]) -> None:
    assert words(script) == expected


def test_a_set_variable_replaces_a_default() -> None:
    assert words("N=${N:-3}\npython -m a.job n=$N\n", {"N": "5"}) == ["n=5"]


def test_no_command_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    assert words(f"touch {mark}\nX=$(touch {mark})\neval 'touch {mark}'\npython -m a.job x=`touch {mark}`\n") == [
        "x=???"
    ]
    assert not mark.exists()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("exit 1\npython -m a.job\n", "line 1: the script exits before it starts a job"),
        ("echo 'never closed\n", "line 1: a quote is never closed"),
        ("A=(1\n", "line 1: `(` is never closed"),
        ("if true; then\n", "expected `elif`"),
        ("python -m a.job n=$((1 / 0))\n", "cannot be evaluated"),
        ("python -m a.job n=$((9 ** 99))\n", "cannot be evaluated"),
        ("f() { true; }\n", "functions of a script are not followed"),
        ("python -m a.job ${X//a/b}\n", "is an expansion that is not followed"),
    ],
)
def test_what_is_not_understood_is_said(script: str, says: str) -> None:
    with pytest.raises(ScriptError, match=f".*{says.replace('(', '[(]').replace('{', '[{]')}"):
        words(script)


def test_a_script_without_a_job_has_none() -> None:
    assert find_launch("echo python -m b.job\n", {}, lambda word: word == "a.job") is None
