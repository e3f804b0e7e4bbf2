"""Commands of `rlinf` that belong to robots and simulators, offered through the entry points `rlinf.commands`."""
