"""The checks of `rlinf doctor`: rules from the facts of a node to a verdict."""
