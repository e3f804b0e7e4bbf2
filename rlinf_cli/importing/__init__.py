"""Conversion of job files of other projects (RLinf, verl) into files of rlinf; `rlinf import` is the command.

Read `convert.py` first: it names the steps. `hydra_files.py` composes, `omegaconf_references.py` rewrites references,
`layouts.py` and `rules.py` say what other projects' keys are here, besides the tables of the models (`other_names`,
`moved`, `not_available`), and `document.py` writes YAML with its comments.
"""
