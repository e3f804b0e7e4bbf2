"""The checks of `rlinf doctor`: functions from node facts to findings, one file per subject."""
