"""HTML reports of runs. Separate modules gather the content, draw charts, and write pages."""
