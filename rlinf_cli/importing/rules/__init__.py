"""Rules for foreign keys whose values change or depend on other keys."""
