"""``tilth env records``: the records that an environment brings, and what has none."""

import json

from tests.errors import raises
from tilth.cli.env_try import write_records
from tilth.cli.main import EnvRecordsCommand
from tilth.core.errors import DataError
from tilth.envs.environment import EnvironmentFault

SEEDS = """
import tilth

class Seeds(tilth.Environment):
    @classmethod
    def records(cls, count):
        return ({"prompt": f"game {i}", "seed": i} for i in range(count or 5))

    def reward(self):
        return 0.0
"""


def test_records_are_lines(tmp_path, capsys):
    (tmp_path / "seeds.py").write_text(SEEDS)
    out = tmp_path / "out.jsonl"
    write_records(EnvRecordsCommand(f"{tmp_path / 'seeds.py'}:Seeds", out))
    assert [json.loads(line)["seed"] for line in out.read_text().splitlines()] == [0, 1, 2, 3, 4]
    assert f"data.source={out}" in capsys.readouterr().out
    with raises(DataError, "FILE.jsonl"):
        write_records(EnvRecordsCommand(f"{tmp_path / 'seeds.py'}:Seeds", out, 3))


def test_an_environment_without_records(tmp_path):
    with raises(EnvironmentFault, "environment.records"):
        write_records(EnvRecordsCommand("calculator", tmp_path / "out.jsonl"))
    assert not (tmp_path / "out.jsonl").exists()
