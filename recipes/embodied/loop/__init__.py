"""The training loop: its phases, who sends what to whom, and videos of its evaluations."""
