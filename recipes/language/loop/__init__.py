"""The training loop of language models: the plan of prompts, the services that have them answered, and the runner."""
