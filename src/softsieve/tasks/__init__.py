"""Tasks: data in, a model and its answers out."""
