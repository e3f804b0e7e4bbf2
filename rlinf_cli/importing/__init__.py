"""The conversion of job files of other projects (RLinf, verl) into files of rlinf, by the command `rlinf import`.

Read `convert.py` first: it names the steps. `sources.py` composes, `references.py` rewrites references, `foreign.toml`
has a row for each key of other projects, whose functions are in `shared_rules.py` and `project_rules.py`, and
`document.py` writes YAML with comments.
"""
