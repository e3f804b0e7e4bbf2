"""Off-policy learning: SAC and TD3, with the options of RLPD and CrossQ; and their replay buffers."""

# The configuration imports the algorithms, so that it is begun first.
import recipes.embodied.config as _config  # noqa: F401 # pyright: ignore[reportUnusedImport]
