"""The papers' tables and figures, and our own claims, run from a checkout: ``python -m experiments``."""
