"""Checkpoints of an earlier rlinf, which were pickled, in the format of this one: the only reader of pickles.

It goes with the release after this one.
"""
