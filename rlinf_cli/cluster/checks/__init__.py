"""The checks of `rlinf doctor`: rules that derive verdicts from the facts of a node."""
