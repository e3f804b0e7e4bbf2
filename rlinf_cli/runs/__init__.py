"""Past and running runs: lookup, tables, logs, comparisons."""
