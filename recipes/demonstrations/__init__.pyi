"""The public names, each with the module that defines it; `__init__.py` imports a name on first use."""

from recipes.demonstrations.load_set import load_demonstrations as load_demonstrations

__all__: list[str]
