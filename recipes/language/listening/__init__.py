"""The parts that servers of a job share: limits of connections and requests, and how they listen on loopback."""
