"""Contents of the page that compares runs: curves over each other, results with intervals over seeds, what differs."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from statistics import NormalDist
from typing import Any

import numpy as np

from tilth.core.errors import DataError
from tilth.ui import format
from tilth.ui.charts import Chart, Line
from tilth.ui.listing import METRICS, measured
from tilth.ui.samples import sample
from tilth.ui.tokens import pieces_of
from tilth.ui.web.follow import FollowedRun
from tilth.ui.web.search import answers_to, prompts_of
from tilth.ui.web.views import AXES, CHARTS, SHAPES, charts_of, points_of, row_of_run

MOST, OF_SWEEP = 8, 64
"""Most runs beside each other; on a page of a sweep, of which the first ``MOST`` have curves and samples."""
PLACE = ("run.name", "run.dir", "run.sweep")
"""Keys that differ wherever runs do."""
MACHINE = ("python", "cpu", "cores", "threads", "accelerator", "host")
"""Facts about the machine and Python."""
VERSION = "version of "
"""Beginning of the names of packages among ``settings_of``."""
QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)
"""Of Student's t, 97.5 %, at 1 to 7 degrees of freedom."""
DATA = "input data"
"""Fingerprint of the data among ``settings_of``."""
LONG = 160
"""Characters of a value that are shown."""
TOKENS = 300
"""Most tokens of a sample that are shown."""
Row = dict[str, Any]


def pages_of(sweep: str, runs: Sequence[FollowedRun]) -> list[list[str]]:
    """Return the names of the runs of a sweep by page, the seeds of a setting beside each other and, unless they are
    more than ``OF_SWEEP``, on one page. DataError: they are fewer than 2."""
    if len(runs) < 2:
        raise DataError(f"compare 2 runs or more, sweep {sweep!r} has {len(runs)}", key="run")
    if len(runs) <= OF_SWEEP:
        return [[run.path.name for run in runs]]
    groups, found = defaultdict[str, list[tuple[int, str]]](list), list[list[str]]()
    keys = [_readable(run) for run in runs]
    for run, one, same in zip(runs, keys, _but_for_seeds(keys)):  # a run may have the name of an earlier version
        groups[_dumped(same)].append((one.get("seed", 0), run.path.name))
    for some in groups.values():
        names = [name for _, name in sorted(some)]
        for seeds in (names[at : at + OF_SWEEP] for at in range(0, len(names), OF_SWEEP)):
            if not found or len(found[-1]) + len(seeds) > OF_SWEEP:
                found.append([])
            found[-1] += seeds
    return found


def _readable(run: FollowedRun) -> Mapping[str, Any]:
    """Return ``settings_of`` a run; of one that cannot be read, which its page reports, settings of its own."""
    try:
        return settings_of(run)
    except DataError:
        return {"unreadable": run.path.name}


def compare_page(runs: Sequence[FollowedRun], words: str, axis: str, smooth: int, prompt: str, sweep: str = "") -> Row:
    """Return the contents of the page for some runs, or for a page of those of a sweep, best settings first. DataError:
    they are not 2 to ``MOST``, or one cannot be read."""
    if not sweep and not 2 <= len(runs) <= MOST:
        raise DataError(f"compare 2 to {MOST} runs, not {len(runs)}: /compare?run=A&run=B", key="run")
    keys = [settings_of(run) for run in runs]
    seeds = over_seeds(runs, keys)
    order = {name: place for place, name in enumerate(name for row in seeds for name in row["runs"])} if sweep else {}
    ordered = sorted(runs, key=lambda run: order.get(run.path.name, len(order)))
    shown = ordered[:MOST]
    known = common_prompts(shown)
    asked = prompt or next(iter(known), "")
    return {
        "names": [run.path.name for run in shown], "rows": [result_of(run) for run in ordered], "words": words,
        "seeds": seeds if sweep or any(len(row["runs"]) > 1 for row in seeds) else [], "sweep": sweep,
        "differing": parted(differing([settings_of(run) for run in shown])), "charts": overlaid(shown, words),
        "axes": AXES, "axis": axis, "smooth": smooth, "prompt": asked, "prompts": known[:50], "values": {}, "about": {},
        "answers": [answers(run, asked) for run in shown] if asked else [],
    }  # fmt: skip


def settings_of(run: FollowedRun) -> dict[str, Any]:
    """Return the recipe by dotted keys, versions of packages, fingerprints of inputs, machine. DataError: not a run."""
    state = run.state()
    environment = state.get("environment") or {}
    about = {f"{VERSION}{name}": v for name, v in (environment.get("packages") or {}).items()}
    about |= {name: environment.get(name) for name in MACHINE} | {"host": state.get("host")}
    about |= {f"input {name}": v for name, v in (state.get("inputs") or {}).items()}
    return run.recipe() | about


def differing(keys: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the keys whose values differ, with the value of each run; "–": it has none."""
    found = []
    for name in sorted({name for one in keys for name in one} - {*PLACE}):
        values = [_shown(one[name]) if name in one else "–" for one in keys]
        if len({json.dumps(one.get(name), default=str) for one in keys}) > 1:
            found.append((name, values))
    return found


def parted(found: Sequence[tuple[str, list[str]]]) -> dict[str, list[tuple[str, list[str]]]]:
    """Return what ``differing`` has found of recipes and data, and apart from it of machines and packages."""
    parts = dict[str, list[tuple[str, list[str]]]](recipe=[], machine=[])
    for name, values in found:
        parts["machine" if name in MACHINE or name.startswith(VERSION) else "recipe"].append((name, values))
    return {"Recipe and data": parts["recipe"], "Machine and packages": parts["machine"]}


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
    """Return the settings of runs (recipe and inputs), each with the means of final and best values over its seeds, and
    their 95 % intervals; the best comes first. values: of the keys in which the settings differ. Runs without an
    evaluation are left out, and of runs with one setting and seed, which did the same work, all but the first."""
    groups, kept = defaultdict[str, list[tuple[FollowedRun, Any]]](list), dict[str, dict[str, Any]]()
    for run, one, same in zip(runs, keys, _but_for_seeds(keys)):
        text = _dumped(same)
        groups[text].append((run, one.get("seed")))
        kept[text] = same
    differ = [name for name, _ in differing([*kept.values()])]
    found = []
    for text, some in groups.items():
        measures = {run.path: [k for k in METRICS if run.summary().get(k) is not None] for run, _ in some}
        some = [(run, seed) for run, seed in some if measures[run.path]]
        name = next((k for k in METRICS if some and all(k in measures[run.path] for run, _ in some)), None)
        if name is None:
            continue
        some = [*{seed: (run, seed) for run, seed in reversed(some)}.values()][::-1]
        values = [points_of(run.table, SHAPES[name])[1] for run, _ in some]
        ends, tops = [float(v[-1]) for v in values], [float(v.min() if "loss" in name else v.max()) for v in values]
        row: Row = {
            "runs": [run.path.name for run, _ in some],
            "seeds": [seed for _, seed in some],
            "metric": SHAPES[name],
        }
        row |= {"values": {key: kept[text].get(key) for key in differ}, "final": interval(ends), "best": interval(tops)}
        found.append(row)
    return sorted(found, key=lambda row: (row["metric"], row["final"][0] * (1 if "loss" in row["metric"] else -1)))


def _but_for_seeds(keys: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what is equal in runs that differ in their seed alone. Data that a source draws by the seed differ with
    it; where one seed has several, they have been changed."""
    own, data = (*PLACE, *MACHINE, "seed", DATA), defaultdict[str, set[Any]](set)
    same = [{k: v for k, v in one.items() if k not in own and not k.startswith(VERSION)} for one in keys]
    for one, mine in zip(keys, same):
        mine |= {DATA: _undrawn(one)} if DATA in one else {}
        data[_dumped([mine, one.get("seed")])].add(one.get(DATA))
    changed = {_dumped(mine) for one, mine in zip(keys, same) if len(data[_dumped([mine, one.get("seed")])]) > 1}
    return [{**mine, DATA: one[DATA]} if _dumped(mine) in changed else mine for one, mine in zip(keys, same)]


def _undrawn(one: Mapping[str, Any]) -> Any:
    """Return the fingerprint of the data without sources that draw by the seed; None where it is of all together."""
    drawn = [bool(part.get("filter") or part.get("transform")) for part in one.get("data.mixture") or ()]
    parts = str(one[DATA]).split(", ")
    if not any(drawn):
        return one[DATA]
    if len(parts) != len(drawn) + bool(one.get("data.heldout")):
        return None
    return [part for part, by_seed in zip_longest(parts, drawn) if not by_seed]


def _dumped(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean of values and half the width of its 95 % interval (Student's t); None for a single one."""
    if len(values) < 2:
        return float(values[0]), None
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(np.mean(values)), student(len(values) - 1) * spread


def student(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t: by Fisher's expansion about the normal one beyond the table, where it
    errs by less than 0.001."""
    if degrees <= len(QUANTILES):
        return QUANTILES[degrees - 1]
    z = NormalDist().inv_cdf(0.975)
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))


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
