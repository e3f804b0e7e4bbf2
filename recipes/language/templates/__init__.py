"""Chat templates of models, and the process that renders them: a template is a program of whoever made the model."""
