"""The sections of a job, one module each. A recipe puts its file together from them."""
