"""Files that others may have written, read as data: nothing in them is imported, called or executed."""
