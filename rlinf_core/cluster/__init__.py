"""Ray as the engine: starting or joining it, what its nodes have, and processes placed on them."""
