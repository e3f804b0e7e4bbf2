"""Tools of agents: calculator, search over a corpus, functions of the user's."""
