"""Small breaks of a room of the product, one at a time, and whether its tests notice."""
