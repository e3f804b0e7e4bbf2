"""Transfer of weights to engines, and export into folders."""
