"""Memory of processes: measured without a job, computed on torch's meta device, summed up as a forecast."""
