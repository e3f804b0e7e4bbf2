"""The job file: its loading by commands, its findings, and its fields as documentation and as JSON Schema."""
