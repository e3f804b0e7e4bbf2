"""Commands that bring machines up, look at them and take them down."""
