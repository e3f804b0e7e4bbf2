"""Running a recipe: `rlinf train`, and the documents it leaves for other commands."""
