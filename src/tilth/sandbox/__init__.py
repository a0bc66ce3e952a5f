"""Sandbox for programs that a model wrote: enforced by the kernel, or it does not start. Imports no torch."""
