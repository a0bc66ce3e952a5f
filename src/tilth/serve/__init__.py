"""Servers over generation engines: an engine client that many clients share, and HTTP in front of it."""
