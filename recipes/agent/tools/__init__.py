"""Tools of agents: calculator, search over a corpus, users' functions."""
