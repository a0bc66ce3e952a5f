"""Tinker's API: models of many clients over one base."""
