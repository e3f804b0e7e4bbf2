"""Commands of `rlinf` that belong to language models, offered through the entry points `rlinf.commands`."""
