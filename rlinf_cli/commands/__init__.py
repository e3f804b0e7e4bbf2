"""One module per command. Each imports its dependencies when it runs, so that `rlinf --help` stays fast."""
