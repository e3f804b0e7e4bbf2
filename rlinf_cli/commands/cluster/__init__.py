"""Commands that bring clusters up, inspect them and take them down."""
