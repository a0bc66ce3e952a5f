"""docs/checkpoints.md names what there is."""

import re
from pathlib import Path

from tests.cli.kept import call
from tilth.config.keys import all_names

COMMANDS = ("ls", "show", "verify", "diff", "export", "prune")


def test_the_page_names_commands_options_and_keys_that_are_there():
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    used = re.findall(r"tilth (ckpt \w+|[a-z]+)([^\n`'#]*)", page)
    assert {command for command, _ in used} > {f"ckpt {name}" for name in COMMANDS}
    texts = {command: call(*command.split(), "--help").stdout for command in {command for command, _ in used}}
    for command, rest in used:
        options = re.findall(r"--[a-z-]+", rest)
        assert texts[command] and all(option in texts[command] for option in options), (command, rest)
    assert set(re.findall(r"`(run\.\w+)`", page)) - {"run.json"} <= set(all_names())
