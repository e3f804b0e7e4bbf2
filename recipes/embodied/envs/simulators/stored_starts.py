"""The comparison, at the start of a run, of stored starts with what holds under its physics."""

from __future__ import annotations

import logging
from typing import Final

from recipes.embodied.envs.first_step import EnvContractError
from recipes.embodied.envs.simulators.package_versions import has_locked_versions, versions_of
from rlinf_core.runners.storage.first_contact import Difference, FirstContact

_LOGGER: Final = logging.getLogger("rlinf")


def compare_starts(contact: FirstContact, section: str, env_type: str, faults: list[str] | None) -> None:
    """Keep the comparison of stored starts, at rest, with the tasks' own descriptions of them.

    Args:
        contact: keeps the result.
        section: the section of the environments, as in `env.eval`.
        env_type: their kind.
        faults: `VectorEnv.start_faults`.

    Raises:
        EnvContractError: they differ under other versions than those of the kind's lock file, and comparisons are not
            skipped.
    """
    if faults is None:
        return
    packages = ", ".join(f"{name} {version}" for name, version in versions_of(env_type).items())
    note = f"{packages}: {'; '.join(faults) or 'the first start of each task is as described'}"
    # Under the versions of published numbers it is a start that its makers stored so, for everybody.
    if faults and not contact.skips and not has_locked_versions(env_type):
        raise EnvContractError(
            f"the stored starts of `{env_type}` do not hold under this physics: {faults[0]}",
            where=section,
            why=f"{packages}; success rates from such starts compare with nobody's",
            help=f"run `rlinf venv setup {env_type}`, which installs the versions of published numbers, and"
            f" `rlinf venv check {env_type}`, which tries each task; `runner.skip_checks=true` uses them all the same",
        )
    if faults:
        _LOGGER.warning("stored starts of %s do not hold: %s", section, note)
    contact.keep(f"stored starts of {section}", "the tasks' own descriptions", Difference(note=note, agrees=not faults))
