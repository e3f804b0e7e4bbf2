"""The training loop: phases, routing between workers, and evaluation videos."""
