"""The assignment of processes to nodes and units: pure arithmetic over a topology."""
