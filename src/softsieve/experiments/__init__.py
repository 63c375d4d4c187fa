"""The tables of the papers, and of our own claims, from one command each."""
