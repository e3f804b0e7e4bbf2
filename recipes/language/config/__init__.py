"""The sections that the files of all recipes of language models share."""
