"""Parallelism: process groups of a mesh, and layouts applied to one-device models from outside."""
