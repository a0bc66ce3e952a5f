"""``tilth guard check``: test this machine while no job computes on it."""

import json

import typer

from tilth.guard.node_check import check_node


def check(*, as_json: bool = False) -> None:
    """Print what the tests found; exit code 1 if something is wrong for certain."""
    found = check_node()
    print(json.dumps(found.as_dict()) if as_json else f"{found.sentence()} ({found.seconds:.1f} s)")
    if not found.sound:
        raise typer.Exit(1)
