"""Start-up: groups of members alone take store operations in proportion to the ranks, and no meeting of all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import SCRIPTS

pytestmark = pytest.mark.dist


@pytest.mark.slow
def test_operations_grow_with_the_ranks_and_meetings_of_all_do_not_happen(tmp_path):
    rows = tmp_path / "rows.json"
    command = [sys.executable, str(Path(SCRIPTS) / "startup.py"), "--quick", "--json", str(rows)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    found = {(row["made_by"], row["ranks"]): row for row in json.loads(rows.read_text())}
    few, many = (found["members", n] for n in (8, 16))
    assert many["operations"] == 2 * few["operations"] and few["meetings"] == many["meetings"] == 0
    few, many = (found["new_group with barriers", n] for n in (8, 16))
    assert many["operations"] > 2.2 * few["operations"] and many["meetings"] > 2 * few["meetings"]
