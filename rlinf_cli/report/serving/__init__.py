"""Live pages of runs on loopback; a run that is followed, its pages and their server have a module each."""
