"""Which process runs on which node with which units: pure arithmetic over a topology."""
