"""Ray as the engine: starting or joining it, facts about its nodes, and placed processes."""
