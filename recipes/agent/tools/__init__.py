"""Tools of agents: calculator, shell, search over a corpus, MCP servers, users' functions."""
