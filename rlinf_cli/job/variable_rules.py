"""Warnings about environment variables of a file that do not do what they seem to."""

from __future__ import annotations

import re
from typing import Final

from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.machines.cluster import EnvConfig
from rlinf_core.config.rules.groups import CLUSTER, Site, variable_paths
from rlinf_core.config.secrets import is_secret, url_secrets
from rlinf_core.config.tree import Path, ScalarNode, find
from rlinf_core.hardware.accelerators.vendors import accelerator_names, get_accelerator

# Variables that rlinf sets per process; one value for a whole node would break them.
PROCESS_VARIABLES: Final = frozenset(
    ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
) | {"NODE_RANK", "NODE_LOCAL_RANK", "RLINF_NODE_RANK"}
# Paths of programs: an interpreter by its name, whatever else is in a folder of programs, and scripts.
_PROGRAM: Final = re.compile(r"/(python|pypy)[0-9.]*[a-z]?$|/bin/[^/]+$|\.(sh|exe)$")
_BIN: Final = re.compile(r"/bin/?$")
_SHELL: Final = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*|^~/|:~/")


def check(site: Site) -> None:
    taken = PROCESS_VARIABLES | _visibility_variables()
    _interpreter(site, (*CLUSTER, "python_interpreter_path"), site.cluster.python_interpreter_path)
    for path, group in site.groups():
        for index, config in enumerate(group.env_configs):
            at = (*path, "env_configs", index)
            _interpreter(site, (*at, "python_interpreter_path"), config.python_interpreter_path)
            _contents(site, at, config, taken)
    _forwarded(site, taken)


def _interpreter(site: Site, path: Path, value: str | None) -> None:
    """Warn of a path that seems to be the folder of an environment: the nodes' own files cannot be seen here."""
    if value is None or site.damaged(path) or _PROGRAM.search(value):
        return
    site.report(
        "interpreter-path",
        f"`{value}` does not look like the path of a Python interpreter",
        path,
        help=f"a folder? Its interpreter is `{value.rstrip('/')}/{'' if _BIN.search(value) else 'bin/'}python`",
        severity=Severity.WARNING,
    )


def _contents(site: Site, at: Path, config: EnvConfig, taken: frozenset[str]) -> None:
    if not config.env_vars and config.python_interpreter_path is None and not site.damaged(at):
        site.report(
            "env-config-empty",
            "this entry of `env_configs` sets nothing",
            at,
            help="add `env_vars` or `python_interpreter_path`, or remove it",
            severity=Severity.WARNING,
        )
    for (name, value), path in zip(config.env_vars, variable_paths(site, at), strict=False):
        _variable(site, path, name, value, taken)


def _variable(site: Site, path: Path, name: str, value: str, taken: frozenset[str]) -> None:
    if name in taken:
        site.report(
            "env-var-of-process",
            f"rlinf sets `{name}` per process; this would set one value for all processes of these nodes",
            path,
            span=site.key(path),
            help="remove it; `component_placement` decides ranks and visible devices",
            severity=Severity.WARNING,
        )
    written = _SHELL.search(value)
    if written:
        site.report(
            "env-var-not-expanded",
            f"no shell expands `{name}`: `{written[0].lstrip(':')}` is used literally",
            path,
            help="write the whole value; PATH and similar variables are prepended to the node's own",
            severity=Severity.WARNING,
        )
    node = find(site.view.tree, path)
    in_file = isinstance(node, ScalarNode) and "${" not in node.span.text
    if in_file and ((is_secret(name, value) and value) or url_secrets(value)):
        site.report(
            "secret-in-file",
            f"the secret value of `{name}` is written in the file",
            path,
            span=site.key(path),
            help=f"write `${{env:{name}}}`, or name it in `cluster.forward_env`",
            severity=Severity.WARNING,
        )


def _visibility_variables() -> frozenset[str]:
    variables = (get_accelerator(name).visibility_variable for name in accelerator_names())
    return frozenset(name for name in variables if name)


def _forwarded(site: Site, taken: frozenset[str]) -> None:
    names: set[str] = set()
    for index, name in enumerate(site.cluster.forward_env):
        path = (*CLUSTER, "forward_env", index)
        if name in taken:
            site.report(
                "env-var-of-process",
                f"rlinf sets `{name}` per process; this machine's value would be wrong elsewhere",
                path,
                help="remove it",
                severity=Severity.WARNING,
            )
        elif name in names:
            site.report(
                "duplicate-env-var",
                f"`{name}` is listed twice",
                path,
                help="keep one of them",
            )
        names.add(name)
