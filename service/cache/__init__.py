"""Answers kept for the next to ask: the protocol, the in-process cache, the key."""
