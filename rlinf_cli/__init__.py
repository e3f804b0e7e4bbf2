"""The `rlinf` command."""

from rlinf_core.config import names


def _names_of_related_projects() -> names.ForeignNames:
    from rlinf_cli.importing import foreign_names as names

    return names


names.use(_names_of_related_projects)
