"""Environments that agents play by text: a game, OpenEnv servers, those of the user's."""
