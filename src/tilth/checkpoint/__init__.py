"""How state survives: checkpoints of safetensors and JSON that are complete or absent, and checked when read."""

from tilth.checkpoint.directory import latest, mark_best, prune, read_best
from tilth.checkpoint.read import Checkpoint, open_checkpoint
from tilth.checkpoint.shards import state_layouts
from tilth.checkpoint.write import abandon_save, begin_save, commit_save, save, write_part

__all__ = [
    "Checkpoint",
    "abandon_save",
    "begin_save",
    "commit_save",
    "latest",
    "mark_best",
    "open_checkpoint",
    "prune",
    "read_best",
    "save",
    "state_layouts",
    "write_part",
]
