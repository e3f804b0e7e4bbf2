"""Pages of HTML about runs: what a page shows is gathered, drawn and written by a module each."""
