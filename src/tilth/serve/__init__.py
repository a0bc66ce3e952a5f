"""Servers over generation engines: an engine room that many clients share, and HTTP in front of it."""
