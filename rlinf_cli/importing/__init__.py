"""Conversion of job files of other projects (RLinf, verl) into files of rlinf; `rlinf import` is the command.

Read `convert.py` first: it names the steps. `hydra_files.py` composes, `omegaconf_references.py` rewrites references,
`rules/` and `foreign_names.toml` map other projects' keys to ours, and `document.py` writes
YAML with comments.
"""
