"""Codes of the stage `composing`."""

from __future__ import annotations

from rlinf_core.config.codes.entry import Code, Example
from rlinf_core.config.diagnostics import Severity

_CLUSTER = "cluster:\n  num_nodes: 1\n  component_placement:\n    actor: 0\n"
_JOB = (
    "recipe: embodied\ncluster:\n  num_nodes: 1\n  component_placement:\n    actor,rollout,env: {node_group: node,"
    " placement: 0}\n"
)

_EXTENDS = (
    Code(
        "extends-form",
        Severity.ERROR,
        "`extends` does not name files",
        "`extends` names the base that a file overrides: one file, or a list of files of which a later one overrides an"
        " earlier one. It is read before references are resolved, so it cannot hold one.",
        wrong=Example("extends: «4»\n" + _CLUSTER),
        right=Example("extends: base.yaml\n" + _CLUSTER, files=(("base.yaml", "runner:\n  max_steps: 4\n"),)),
    ),
    Code(
        "base-unreadable",
        Severity.ERROR,
        "a file that `extends` names cannot be read",
        "A base is looked for relative to the file that extends it, then among the configurations that come with rlinf."
        " It must be a readable UTF-8 file.",
        wrong=Example("extends: «bsae.yaml»\n" + _CLUSTER, files=(("base.yaml", "runner:\n  max_steps: 4\n"),)),
        right=Example("extends: base.yaml\n" + _CLUSTER, files=(("base.yaml", "runner:\n  max_steps: 4\n"),)),
    ),
    Code(
        "extends-cycle",
        Severity.ERROR,
        "files extend each other in a circle",
        "A file overrides its bases, so it cannot be a base of one of them, nor of itself. A chain of more than 32"
        " files is refused too.",
        wrong=Example(
            "extends: small.yaml\n" + _CLUSTER,
            files=(("small.yaml", "extends: large.yaml\n"), ("large.yaml", "extends: «small.yaml»\n")),
        ),
        right=Example(
            "extends: small.yaml\n" + _CLUSTER,
            files=(("small.yaml", "extends: large.yaml\n"), ("large.yaml", "runner:\n  max_steps: 4\n")),
        ),
    ),
)

_OVERRIDES = (
    Code(
        "override-syntax",
        Severity.ERROR,
        "an argument is no override",
        "An override is `section.key=value`, or `~section.key` to delete. Keys are separated by `.`, an item of a list"
        " is"
        ' `[0]`, and a key that holds a dot or a blank stands in quotes: `cluster.component_placement."actor,env"=0-3`.'
        " An argument is one line of text.",
        wrong=Example(_CLUSTER, overrides=("cluster.«.»num_nodes=2",)),
        right=Example(_CLUSTER, overrides=("cluster.num_nodes=2",)),
    ),
    Code(
        "override-plus",
        Severity.ERROR,
        "`+` and `++` are not needed",
        "In hydra `+key=value` adds a key that the configuration does not have yet. Here every key that the job knows"
        " can be set, whether the file mentions it or not, and one that the job does not know is an error.",
        wrong=Example(_CLUSTER, overrides=("«+»cluster.head_address=10.0.0.1",)),
        right=Example(_CLUSTER, overrides=("cluster.head_address=10.0.0.1",)),
    ),
    Code(
        "override-path",
        Severity.ERROR,
        "an override does not fit the configuration",
        "A path leads through mappings by key and through lists by `[index]`. It cannot lead through a single value,"
        " add an item to a list, or delete what is not there. `extends` is read before the overrides and cannot be"
        " one.",
        wrong=Example(_CLUSTER, overrides=("cluster.num_nodes.«total»=2",)),
        right=Example(_CLUSTER, overrides=("cluster.num_nodes=2",)),
    ),
    Code(
        "override-value",
        Severity.ERROR,
        "a colon without a blank in a mapping",
        "The value of an override is YAML, where `{a:1}` is a mapping with the one key `a:1` and no value. (Hydra"
        " reads it as `{a: 1}`.) Write a blank after the colon, and quote the argument for the shell.",
        wrong=Example(_CLUSTER, overrides=("cluster.component_placement={«actor:0»}",)),
        right=Example(_CLUSTER, overrides=("cluster.component_placement={actor: 0}",)),
    ),
    Code(
        "override-shadowed",
        Severity.WARNING,
        "a later override replaces an earlier one",
        "Overrides are applied from left to right and the last one holds. This one sets a value that a later one"
        " replaces, so it has no effect. Mappings are merged, so they don't replace each other.",
        wrong=Example(_CLUSTER, overrides=("«cluster.num_nodes=2»", "cluster.num_nodes=1")),
        right=Example(_CLUSTER, overrides=("cluster.num_nodes=1",)),
    ),
)

_EXPLODING = "".join(f"  a{n}: '{f'${{x.a{n - 1}}}' * 10}'\n" for n in range(1, 5))

_REFERENCES = (
    Code(
        "reference-syntax",
        Severity.ERROR,
        "a `${` begins no reference",
        "The references are `${section.key}`, always the whole path, `${env:NAME}`, and `${env:NAME:-default}` for"
        " when the variable is not set or empty; `${oc.env:NAME}` and `${oc.env:NAME,default}` mean the same. They"
        " don't nest. Write `$${` for a literal `${`.",
        wrong=Example("cluster:\n  num_nodes: «${multiply:2,4}»\n"),
        right=Example("cluster:\n  num_nodes: 8\n"),
    ),
    Code(
        "unknown-reference",
        Severity.ERROR,
        "a reference names nothing",
        "A reference names a value that the file, a base or an override sets, by its whole path. What is only a default"
        " of the job cannot be referred to: write it in the file.",
        wrong=Example("cluster:\n  num_nodes: 2\n  component_placement:\n    actor: 0-«${cluster.num_node}»\n"),
        right=Example("cluster:\n  num_nodes: 2\n  component_placement:\n    actor: 0-${cluster.num_nodes}\n"),
    ),
    Code(
        "unknown-variable",
        Severity.ERROR,
        "a reference names a variable that is not set",
        "`${env:NAME}` is replaced by a variable of the environment in which the command runs. Set it, or write a"
        " default: `${env:NAME:-default}`.",
        wrong=Example("cluster:\n  num_nodes: «${env:NODES}»\n"),
        right=Example("cluster:\n  num_nodes: ${env:NODES:-1}\n"),
    ),
    Code(
        "reference-not-checked",
        Severity.NOTE,
        "nothing reads the section of a reference that cannot be resolved",
        "A file without `recipe` describes machines: of its sections only `cluster` is read. References elsewhere that"
        " cannot be resolved (a variable that is not set, a resolver that rlinf does not have) are listed and left as"
        " they are. One that `cluster` needs is an error.",
        wrong=Example(_CLUSTER + "runner:\n  output_dir: «${env:WHERE_RESULTS_GO}»\n"),
        right=Example(_CLUSTER + "runner:\n  output_dir: ${env:WHERE_RESULTS_GO:-runs}\n"),
    ),
    Code(
        "reference-cycle",
        Severity.ERROR,
        "references lead back to where they began",
        "A value that refers to a value that refers back has no value at all. The message lists the way round; give"
        " one of them a value of its own.",
        wrong=Example(_JOB + "runner:\n  max_steps: «${runner.max_epochs}»\n  max_epochs: ${runner.max_steps}\n"),
        right=Example(_JOB + "runner:\n  max_steps: 100\n  max_epochs: ${runner.max_steps}\n"),
    ),
    Code(
        "reference-in-text",
        Severity.ERROR,
        "a mapping or a list inside a text",
        "A reference that is the whole value may name anything, and copies it. One inside a longer text is replaced by"
        " text, so it must name a single value.",
        wrong=Example(_JOB + "runner:\n  logger:\n    log_path: runs/«${cluster}»\n"),
        right=Example(_JOB + "runner:\n  logger:\n    log_path: runs/${cluster.num_nodes}\n"),
    ),
    Code(
        "reference-too-large",
        Severity.ERROR,
        "references multiply beyond reason",
        "References to values that hold references can make a small file enormous. What they copy is limited to a"
        " million values and characters in all, and they lead at most 120 steps deep.",
        wrong=Example(
            f"{_CLUSTER}  head_address: '{'${x.a4}' * 8}«${{x.a4}}»{'${x.a4}' * 9}'\nx:\n  a0: 0123456789\n{_EXPLODING}"
        ),
        right=Example(f"{_CLUSTER}  head_address: ${{x.a0}}\nx:\n  a0: 0123456789\n{_EXPLODING}"),
    ),
)

CODES: tuple[Code, ...] = (*_EXTENDS, *_OVERRIDES, *_REFERENCES)
