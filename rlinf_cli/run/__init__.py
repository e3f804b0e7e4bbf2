"""Running a recipe: `rlinf train`, and the documents that it writes for other commands."""
