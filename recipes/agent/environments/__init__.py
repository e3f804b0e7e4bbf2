"""Text environments for agents: a game, OpenEnv servers, the user's."""
