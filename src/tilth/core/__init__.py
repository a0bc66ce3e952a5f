"""The words everyone shares: trajectories, batches, layouts, random numbers, checksums, errors."""
