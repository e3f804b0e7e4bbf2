"""Tasks in the format of Harbor: folders with a container image, read, checked and graded here."""
