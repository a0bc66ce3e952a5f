"""``tilth algorithms`` on terminals of every width."""

import pytest
from typer.testing import CliRunner

from tilth.cli.main import app
from tilth.rl.overview import COLUMNS, overview, row


@pytest.mark.parametrize("width", [40, 60, 80, 100, 250])
@pytest.mark.parametrize("flows", [(), ("dapo", "ppo", "vapo")])
def test_no_word_of_the_table_is_broken_and_no_line_too_long(width, flows):
    found = CliRunner(env={"COLUMNS": str(width)}).invoke(app, ["algorithms", *flows])
    lines = found.stdout.split("\nadvantages:")[0].splitlines()
    assert found.exit_code == 0 and max(map(len, lines)) <= width
    shown = {word for line in lines for word in line.split()}
    if flows:
        assert {*flows, "overlong_penalty"} <= shown
        return
    cells = [*COLUMNS, *(cell for facts in overview().values() for cell in row(facts).values())]
    assert {word for cell in cells for word in cell.split()} <= shown
