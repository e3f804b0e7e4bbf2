"""The `rlinf` command."""

from rlinf_core.config import foreign_names


def _names_of_related_projects() -> foreign_names.ForeignNames:
    from rlinf_cli.importing import foreign_names as names

    return names


foreign_names.use(_names_of_related_projects)
