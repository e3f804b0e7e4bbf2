"""Conversion of an earlier rlinf's pickled checkpoints to the present format; the only reader of pickles.

To be removed one release after this one.
"""
