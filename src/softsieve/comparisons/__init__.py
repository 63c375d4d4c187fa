"""Losses and heads beside their rivals on a user's own data: what `softsieve compare` and `softsieve head bench` do."""
