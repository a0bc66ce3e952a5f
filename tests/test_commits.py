"""Titles of commits: an imperative of the field's verbs, at most 72 characters."""

import subprocess
from pathlib import Path

import pytest

FIRST = "791361e2a0"
"""Commit before the first one that is held to the rule."""
MOST = 72
VERBS = set("""
Abort Accept Add Align Allow Append Apply Assign Avoid Await Balance Batch Bound Build Cache Call Cancel Capture Check
Choose Clip Close Collect Compare Compile Compress Compute Configure Construct Copy Correct Count Cover Cut Deal
Declare Decode Delete Deny Describe Detect Discard Display Divide Document Drain Draft Draw Drive Drop Emit Encode End
Enforce Escape Evaluate Exclude Expand Export Expose Extend Extract Fail Fill Find Fit Fix Flush Follow Fork Format
Frame Freeze Gather Generate Give Grade Group Guard Halve Handle Hash Hide Hint Hold Implement Import Include Index
Inline Install Isolate Join Journal Judge Keep Key Kill Learn Leave Limit List Load Label Lock Log Loosen Make Mark Mask
Match Measure Merge Move Name Normalise Number Offer Omit Open Order Orthogonalise Overlap Pack Pad Parse Pass Pin
Place Plan Play Plot Poll Predict Prefer Print Profile Propose Publish Push Put Queue Quote Raise Rank Read Rebuild
Record Recover Reduce Refuse Reject Release Remove Rename Render Reorder Repeat Replace Replay Report Request Require
Rerun Reset Resolve Restart Restore Retry Return Reuse Revert Rewrite Rotate Round Run Sample Save Scale Schedule Score
Scrub Search Send Separate Serve Set Shard Share Show Shrink Shut Simplify Skip Sort Specify Split Start Stop Store
Stream Strip Sum Support Survive Swap Sync Tell Test Time Tokenise Trace Train Transfer Translate Treat Trim Trust Try
Tune Type Unify Update Upgrade Use Validate Verify Wait Wake Warm Warn Wrap Write
""".split())  # fmt: skip


def faults(title: str) -> list[str]:
    verb = title.partition(" ")[0]
    return [
        *([f"{verb!r} is not a verb of the list"] if verb not in VERBS else []),
        *([f"{len(title)} characters"] if len(title) > MOST else []),
        *(["ends with a full stop"] if title.endswith(".") else []),
    ]


def test_commits_have_titles_in_the_field_s_words():
    git = ["git", "-C", str(Path(__file__).parents[1])]
    try:
        log = subprocess.run(
            [*git, "log", "--no-merges", "--format=%s", f"{FIRST}..HEAD"], capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if log.returncode:
        pytest.skip("no history of commits here")
    assert {title: wrong for title in log.stdout.splitlines() if (wrong := faults(title))} == {}


@pytest.mark.parametrize(
    "title",
    ["Say of the time of a job what is known", "Fixed the loader", "Add a page.", "Report " + 66 * "x", "report it"],
)
def test_other_titles_are_refused(title):
    assert faults(title)
