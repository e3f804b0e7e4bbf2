"""Commands of `rlinf` that belong to agents, offered through the entry points `rlinf.commands`."""
