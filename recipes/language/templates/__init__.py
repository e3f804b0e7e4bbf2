"""Chat templates of models, and the process that renders them, as a template is an untrusted program."""
