"""Shared types: trajectories, batches, layouts, random numbers, checksums, errors."""
