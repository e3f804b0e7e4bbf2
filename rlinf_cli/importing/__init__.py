"""Conversion of job files of other projects (RLinf, verl) into files of rlinf; `rlinf import` is the command.

Read `convert.py` first: it names the steps. `hydra_files.py` composes, `omegaconf_references.py` rewrites references,
`rules/` and `foreign_names.toml` say what other projects' keys are here, and `document.py` writes YAML with its
comments.
"""
