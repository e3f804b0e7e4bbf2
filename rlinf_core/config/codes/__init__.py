"""The diagnostic codes: one entry per rule, which `rlinf explain` prints and tests hold against the rule itself."""
