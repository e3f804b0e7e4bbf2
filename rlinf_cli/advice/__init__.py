"""`rlinf inspect placement --advise`: better placements by the record of runs."""
