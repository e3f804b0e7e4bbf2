"""Memory forecasts and measured peaks."""
