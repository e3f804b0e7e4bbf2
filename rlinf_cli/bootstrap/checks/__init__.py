"""The checks of `rlinf doctor`: functions from the answers of nodes to findings, one file for each subject."""
