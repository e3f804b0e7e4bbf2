"""The job file: reading it for a command, its findings, its fields as documentation and as JSON Schema."""
