"""Ranks: who they are, and what they agree on."""
