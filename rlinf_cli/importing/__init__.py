"""Conversion of job files of other projects (RLinf, verl) into files of rlinf; `rlinf import` is the command.

Read `convert.py` first: it names the steps. `hydra_files.py` composes, `references.py` rewrites references,
`foreign.toml` has a row for each key of other projects, whose functions are in `rules/`, and `document.py` writes YAML
with comments.
"""
