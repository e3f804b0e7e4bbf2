"""The rules of `rlinf why`, a file for each family; `registry` lists them."""
