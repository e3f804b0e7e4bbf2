"""Vision-language-action policies from folders of published weights."""
