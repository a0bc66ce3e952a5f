"""How state survives: checkpoints of safetensors and JSON that are complete or absent, and checked when read."""

from tilth.checkpoint.directory import latest, mark_best, prune, read_best
from tilth.checkpoint.read import Checkpoint, open_checkpoint
from tilth.checkpoint.write import save

__all__ = ["Checkpoint", "latest", "mark_best", "open_checkpoint", "prune", "read_best", "save"]
