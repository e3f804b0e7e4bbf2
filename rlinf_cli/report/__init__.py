"""HTML reports of runs; gathering, charts and pages have a module each."""
