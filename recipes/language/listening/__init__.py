"""Parts that a job's HTTP servers share: limits of connections and requests, and listening on loopback."""
