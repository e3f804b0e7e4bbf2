"""Rules about code and packages that a file needs: whether the processes of a component can import them."""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import Final, Literal

from recipes.sections.checks import Report
from rlinf_core import JobConfig
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.sections.cluster import CLUSTER_LABEL
from rlinf_core.config.tree import Path
from rlinf_core.node.environment import process_environment
from rlinf_core.process.import_path import locate, syntax_tree
from rlinf_core.process.requirements import absence, install_command, missing_modules

Kind = Literal["class", "function", "value"]
# Expressions whose value is neither a class nor a function.
_PLAIN: Final = (ast.Constant, ast.List, ast.Dict, ast.Set, ast.Tuple, ast.JoinedStr)


def check_import(
    config: JobConfig,
    at: Path,
    target: str,
    component: str,
    report: Report,
    *,
    is_class: bool = False,
    is_function: bool = False,
) -> None:
    """Report a `package.module:name` that the processes of a component could not import.

    Args:
        config: the file.
        at: the key that names it.
        target: the `package.module:name`.
        component: the component whose processes import `target`.
        report: takes findings.
        is_class: whether `target` must be a class that extends one of rlinf's or gymnasium's, as an environment or a
            policy; no class of Python's own does.
        is_function: whether `target` must be no class, as of an agent or a tool.
    """
    module = target.partition(":")[0]
    if is_class and module.partition(".")[0] in sys.stdlib_module_names:
        message = f"`{target}` is in Python's standard library, which defines no such component"
        report(at, "unknown-choice", message, "name your own module, as in `my_package.module:name`")
        return
    missing = missing_module(target)
    if not runs_in_this_interpreter(config, component):
        if missing:
            message = f"`{target}` cannot be checked here, because `{component}` runs in another interpreter: {missing}"
            report(at, "missing-extra", message, severity=Severity.NOTE)
        return
    if missing:
        help = f"install it, or start rlinf where `{module}` can be imported (`PYTHONPATH=FOLDER`)"
        report(at, "missing-extra", f"`{target}` cannot be imported: {missing}", help)
        return
    wrong = missing_name(target)
    if wrong:
        report(at, "unknown-choice", f"`{target}` cannot be imported: {wrong}", "correct the name")
        return
    kind = _kind_of(target)
    if kind == "value" or (kind == "function" and is_class) or (kind == "class" and is_function):
        wanted = "a class" if is_class else "a function" if is_function else "a class or a function"
        report(at, "unknown-choice", f"`{target}` is a {kind}, not {wanted}", f"name {wanted}")


def lacks_packages(at: Path, what: str, modules: Iterable[str], report: Report, further: str = "") -> bool:
    """Report packages that this interpreter lacks, and return whether it lacks any.

    Args:
        at: the key that needs them.
        what: the beginning of the message, as in `LoRA needs`.
        modules: the modules.
        report: takes findings.
        further: the end of the advice, after the command that installs them.
    """
    missing = missing_modules(list(modules))
    if missing:
        message = f"{what} the package `{missing[0]}`, {absence(missing[0])}"
        report(at, "missing-extra", message, f"run `{install_command(*missing)}`{further}")
    return bool(missing)


def check_sandbox(config: JobConfig, at: Path, what: str, component: str, report: Report) -> None:
    """Report that programs of a model could not be run in the sandbox.

    Args:
        config: the file.
        at: the key that runs programs.
        what: its name, for the message.
        component: the component whose processes run them.
        report: takes findings.
    """
    if runs_in_this_interpreter(config, component) and shutil.which("bwrap") is None:
        message = f"`{what}` runs programs in a bubblewrap sandbox, and bubblewrap is not installed"
        report(at, "missing-extra", message, "run `apt install bubblewrap`")


def check_own_algorithm(config: JobConfig, adv_type: str, loss_type: str, report: Report) -> None:
    """Report custom functions in `algorithm` that the actors could not import."""
    for key, name in (("adv_type", adv_type), ("loss_type", loss_type)):
        if ":" in name:
            check_import(config, ("algorithm", key), name, "actor", report)


def runs_in_this_interpreter(config: JobConfig, component: str) -> bool:
    """Return whether the processes of a component run here, in the Python that is checking the file."""
    cluster = config.cluster
    elsewhere = cluster.hosts or any(group.hosts for group in cluster.node_groups)
    entry = cluster.component_placement.get(component)
    labels = (entry.node_group if entry else ()) or (CLUSTER_LABEL,)
    interpreters = [process_environment(cluster, 0, label).interpreter for label in labels]
    return cluster.num_nodes == 1 and not elsewhere and not any(interpreters)


def missing_module(target: str) -> str | None:
    """Return why the module of `package.module:name` cannot be found here, or None if it is there."""
    module = target.partition(":")[0]
    return None if locate(module) is not None else f"there is no module `{module}`"


def missing_name(target: str) -> str | None:
    """Return why the module of `package.module:name` lacks the name, or None if it may have it.

    The module is parsed, not imported: an import may take seconds and run any code.
    """
    module, _, name = target.partition(":")
    spec = locate(module)
    try:
        tree = syntax_tree(spec) if spec is not None else None
    except ValueError as error:
        return str(error)
    if spec is None or tree is None:
        return None
    names = {name for name, _ in _bound(tree.body)}
    return None if name in names or "*" in names or "__getattr__" in names else f"{spec.origin} defines no `{name}`"


def _kind_of(target: str) -> Kind | None:
    """Return what the module of `package.module:name` binds the name to; None if parsing does not tell."""
    module, _, name = target.partition(":")
    spec = locate(module)
    tree = syntax_tree(spec) if spec is not None else None
    if tree is None:
        return None
    kinds: set[Kind | None] = {kind for bound, kind in _bound(tree.body) if bound == name}
    return kinds.pop() if len(kinds) == 1 else None


def _bound(statements: list[ast.stmt]) -> Iterator[tuple[str, Kind | None]]:
    """Yield the names that statements of a module bind, those in branches included, and their kinds where known."""
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            # A decorator may return anything.
            kind: Kind = "class" if isinstance(statement, ast.ClassDef) else "function"
            yield statement.name, None if statement.decorator_list else kind
        else:
            is_plain = isinstance(statement, ast.Assign) and isinstance(statement.value, _PLAIN)
            for node in ast.walk(statement):
                if isinstance(node, ast.alias):
                    yield node.asname or node.name.partition(".")[0], None
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id, "value" if is_plain else None
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    yield node.name, None
