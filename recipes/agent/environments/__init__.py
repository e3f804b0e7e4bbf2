"""Environments that agents play by text: a game, OpenEnv servers, the user's."""
