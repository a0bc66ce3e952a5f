"""Contents of the page that compares runs: curves over each other, results with intervals over seeds, what differs."""

import json
import math
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilth.core.errors import DataError
from tilth.runs.files import flattened
from tilth.runs.readers import read_state
from tilth.ui import format
from tilth.ui.charts import Chart, Line
from tilth.ui.listing import METRICS, measured
from tilth.ui.samples import sample
from tilth.ui.tokens import pieces_of
from tilth.ui.web.follow import FollowedRun
from tilth.ui.web.search import answers_to, prompts_of
from tilth.ui.web.views import AXES, CHARTS, SHAPES, charts_of, points_of, row_of_run

MOST = 8
"""Most runs beside each other."""
PLACE = ("run.name", "run.dir")
"""Keys that differ wherever runs do."""
QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)
"""Of Student's t, 97.5 %, at 1 to 7 degrees of freedom."""
LONG = 160
"""Characters of a value that are shown."""
TOKENS = 300
"""Most tokens of a sample that are shown."""
Row = dict[str, Any]


def compare_page(runs: Sequence[FollowedRun], words: str, axis: str, smooth: int, prompt: str) -> Row:
    """Return the contents of the page for some runs. DataError: they are not 2 to ``MOST``, or one cannot be read."""
    if not 2 <= len(runs) <= MOST:
        raise DataError(f"compare 2 to {MOST} runs, not {len(runs)}: /compare?run=A&run=B", key="run")
    keys = [settings_of(run) for run in runs]
    known = common_prompts(runs)
    asked = prompt or next(iter(known), "")
    return {
        "names": [run.path.name for run in runs], "rows": [result_of(run) for run in runs], "words": words,
        "seeds": over_seeds(runs, keys), "differing": differing(keys), "charts": overlaid(runs, words), "axis": axis,
        "axes": AXES, "smooth": smooth, "prompt": asked, "prompts": known[:50], "values": {}, "about": {},
        "answers": [answers(run, asked) for run in runs] if asked else [],
    }  # fmt: skip


def settings_of(run: FollowedRun) -> dict[str, Any]:
    """Return the recipe by dotted keys, versions of packages, fingerprints of inputs, machine. DataError: not a run."""
    state = read_state(run.path)
    try:
        recipe = tomllib.loads((run.path / "recipe.toml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"{run.path.name}/recipe.toml cannot be read: {error}", key="recipe.toml") from error
    environment = state.get("environment") or {}
    about = {f"version of {name}": v for name, v in (environment.get("packages") or {}).items()}
    about |= {name: environment.get(name) for name in ("python", "cpu", "cores", "threads", "accelerator")}
    about |= {f"input {name}": v for name, v in (state.get("inputs") or {}).items()} | {"host": state.get("host")}
    return flattened(recipe) | about


def differing(keys: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the keys whose values differ, with the value of each run; "–": it has none."""
    found = []
    for name in sorted({name for one in keys for name in one} - {*PLACE}):
        values = [_shown(one[name]) if name in one else "–" for one in keys]
        if len({json.dumps(one.get(name), default=str) for one in keys}) > 1:
            found.append((name, values))
    return found


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= LONG else f"{text[:LONG]}…"


def result_of(run: FollowedRun) -> Row:
    """Return the row of a run: its state, newest and best value of its main metric, its interval."""
    row, summary = row_of_run(run), run.summary()
    return row | {
        "seconds": summary["seconds"], "best": format.best(summary["best"]).removeprefix("best "),
        "final": measured(row), "range": format.bounds("accuracy/" if row["metric"] == "accuracy" else "",
                                                       summary["heldout_range"]),
    }  # fmt: skip


def over_seeds(runs: Sequence[FollowedRun], keys: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the means of the final and best values of each recipe that ran with several seeds, with 95 % intervals."""
    groups, seeds = defaultdict[str, list[FollowedRun]](list), dict[Path, Any]()
    for run, one in zip(runs, keys):
        seeds[run.path] = one.get("seed")
        same = {k: v for k, v in one.items() if k not in (*PLACE, "seed") and not k.startswith(("input ", "version "))}
        groups[json.dumps(same, sort_keys=True, default=str)].append(run)
    found = []
    for some in (group for group in groups.values() if len({seeds[run.path] for run in group}) == len(group) > 1):
        name = next((k for k in METRICS if all(run.summary().get(k) is not None for run in some)), None)
        if name is not None:
            values = [points_of(run.table, SHAPES[name])[1] for run in some]
            ends, tops = [float(v[-1]) for v in values], [float(v.min() if "loss" in name else v.max()) for v in values]
            row = {"runs": [run.path.name for run in some], "metric": SHAPES[name]}
            found.append(row | {"final": interval(ends), "best": interval(tops)})
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of 2 to ``MOST`` values and half the width of its 95 % interval (Student's t)."""
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(np.mean(values)), QUANTILES[len(values) - 2] * spread


def overlaid(runs: Sequence[FollowedRun], words: str) -> list[Chart]:
    """Return the charts that any of the runs fills, with one metric each, so that its lines are the runs."""
    found: dict[str, Chart] = {}
    for chart in (chart for run in runs for chart in charts_of(run.table, words)):
        for line in chart.lines:
            title = f"{chart.title}, {line.label}" if line.label else chart.title
            found.setdefault(
                line.metric, Chart(title, (Line(line.metric, line.colour),), chart.form, chart.note, chart.log)
            )
    return [*found.values()][:CHARTS]


def common_prompts(runs: Sequence[FollowedRun]) -> list[str]:
    """Return prompts that all of the runs answered lately; without such, those of the first one."""
    each = [prompts_of(run.path) for run in runs]
    common = [prompt for prompt in each[0] if all(prompt in other for other in each[1:])]
    return common or each[0]


def answers(run: FollowedRun, prompt: str) -> list[Row]:
    """Return the newest samples of a prompt, coloured."""
    pieces = pieces_of(run.path)
    return [{"step": r["step"], "id": r["id"], "s": sample(r, pieces, TOKENS)} for r in answers_to(run.path, prompt)]
