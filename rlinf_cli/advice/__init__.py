"""`rlinf inspect placement --advise`: better placements, estimated from the records of runs."""
