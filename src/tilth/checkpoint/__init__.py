"""Save, load, verify and retain checkpoints of safetensors and JSON, which are complete or absent."""

from tilth.checkpoint.directory import complete, latest, listing, mark_best, prune, quarantine, read_best, record_best
from tilth.checkpoint.read import Checkpoint, Share, newest_valid, open_checkpoint
from tilth.checkpoint.saver import Commit, Saver, Snapshot, abandon_save, begin_save, commit_save, save
from tilth.checkpoint.snapshot import Group, state_layouts
from tilth.checkpoint.storage import Location

__all__ = ["Checkpoint", "Commit", "Group", "Location", "Saver", "Share", "Snapshot", "abandon_save", "begin_save"]
__all__ += ["commit_save", "complete", "latest", "listing", "mark_best", "newest_valid", "record_best"]
__all__ += ["open_checkpoint", "prune", "quarantine", "read_best", "save", "state_layouts"]
