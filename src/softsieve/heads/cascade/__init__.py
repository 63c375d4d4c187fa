"""The cascade (ours): short codes of all rows, longer ones of those that may matter, exact rows of the last."""
