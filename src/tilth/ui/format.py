"""Numbers as text, the same in terminal and report; text of files and models made safe for a terminal."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from tilth.config.flows import FLOWS
from tilth.plan.steps import size as plan_size
from tilth.runs.metrics import GENERATION, METRICS

PHASES = {"warmup": "warm-up", "values": "critic"}  # phases that are not flows
FATES = {"finished": "ended", "consumed": "learned from", "dropped": "dropped"}  # of samples that may be behind
AGES = 8  # versions behind that are told apart


def plain(text: str, newline: str = "\n") -> str:
    """Replace control characters, by which a text of a file or a model would control the terminal."""
    return "".join(c if c.isprintable() or c == "\t" else newline if c == "\n" else "\ufffd" for c in text)


def duration(seconds: float) -> str:
    """``0:07``, ``2:05`` or ``1:02:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def timed(seconds: float) -> str:
    """``0:07 min``, ``2:05 min`` or ``1:02:05 h``."""
    return f"{duration(seconds)} {'h' if round(seconds) >= 3600 else 'min'}"


def ago(seconds: float) -> str:
    """A past time in its largest unit: ``12 s``, ``5 min``, ``3 h`` or ``2 days``."""
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            number = int(seconds // length)
            return f"{number} {'day' if unit == 'days' and number == 1 else unit}"
    return f"{int(seconds)} s"


def count(number: int, what: str) -> str:
    """``1 step``, ``2,400 steps``."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def steps(done: int, planned: int | None) -> str:
    """``2,400 of 10,000``: the newest step and the last one of a run; the first alone where the other is unknown."""
    return f"{done:,} of {planned:,}" if planned else f"{done:,}"


def share(value: float | None) -> str:
    """``94.1 %``; a dash for None."""
    return "–" if value is None else f"{100 * value:.1f} %"


def amount(number: float) -> str:
    """``855k``, ``1.2M``."""
    return next((f"{number / s:.3g}{u}" for u, s in (("B", 1e9), ("M", 1e6), ("k", 1e3)) if number >= s), f"{number:g}")


def date(text: str) -> str:
    """``1 May 2026, 12:30 UTC`` of an ISO 8601 time."""
    return f"{datetime.fromisoformat(text):%d %B %Y, %H:%M} UTC".lstrip("0")


MEASURES = {"accuracy/heldout": "accuracy", "reward/heldout": "mean reward"}
"""Metric of an evaluation -> its name in text."""


def figure(metric: str, value: float | None) -> str:
    """Format a value of a metric: accuracy in percent, a reward as a number."""
    return share(value) if metric.startswith("accuracy/") else number(value)


def bounds(metric: str, found: Sequence[float] | None) -> str:
    """Format a 95 % interval: ``66 to 76 %``, or numbers for a reward; empty if it is not known."""
    if found is None:
        return ""
    low, high = found
    if not metric.startswith("accuracy/"):
        return f"{number(low)} to {number(high)}"
    digits = 0 if high - low >= 0.03 else 1
    return f"{100 * low:.{digits}f} to {100 * high:.{digits}f} %"


def ranged(metric: str, value: float | None, found: Sequence[float] | None) -> str:
    """Format a value with its 95 % interval, if that is known: ``71.3 % (66 to 76 %)``."""
    return figure(metric, value) + (f" ({bounds(metric, found)})" if found else "")


def unclear(phase: Mapping[str, Any]) -> str:
    """Return ``no change that 300 prompts can show`` for a phase whose change is within its interval; else nothing."""
    change, count = phase.get("change"), phase.get("prompts")
    if change is None or not change[0] <= 0 <= change[1] or phase["first"] == phase["last"]:
        return ""
    return f"no change that {f'{count:,.0f}' if count else 'these'} prompts can show"


def number(value: float | None) -> str:
    """Format with three significant digits and commas; an exponent only below 0.001."""
    if value is None:
        return "–"
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1e}" if abs(value) < 1e-3 else f"{value:.3g}"


def brief(seconds: float) -> str:
    """A short time: ``25 µs``, ``136 ms`` or ``3.2 s``."""
    unit, scale = next(((u, s) for u, s in (("s", 1), ("ms", 1e3)) if seconds * s >= 1), ("µs", 1e6))
    return "0" if seconds == 0 else f"{seconds * scale:.3g} {unit}"


def part(value: float) -> str:
    """A coarse share of a whole: ``37 %``, ``2.8 %``, ``< 0.1 %``."""
    if value == 0 or value >= 0.0995:
        return f"{100 * value:.0f} %"
    return f"{100 * value:.1f} %" if value >= 0.0005 else "< 0.1 %"


def size(nbytes: float | None) -> str:
    """``1.4 GB`` (10^9 bytes)."""
    return "–" if nbytes is None else plan_size(nbytes)


def best(found: dict[str, Any] | None) -> str:
    """``best at step 300: held-out accuracy 81.2 %``; empty if no evaluation chose one."""
    if found is None:
        return ""
    start, metric, value = f"best at step {found['step']:,}: ", found.get("metric"), found["value"]
    if metric == "loss/heldout":
        return f"{start}held-out loss {value:.4f} nats per token"
    if metric == "accuracy/pairs":
        return f"{start}{ranged('accuracy/pairs', value, found.get('range'))} of the held-out pairs in their order"
    return f"{start}held-out {MEASURES[found['metric']]} {ranged(found['metric'], value, found.get('range'))}"


def phase_name(phase: str) -> str:
    """Return the title of a phase."""
    return FLOWS[phase].title if phase in FLOWS else PHASES.get(phase, phase or "run")


def verdict(sample: dict[str, Any]) -> str:
    """Classify a sampled answer by its reward: ``right``, ``wrong``, ``partly`` or ``missing``."""
    reward = sample.get("reward")
    if reward is None:
        return "missing"
    return "right" if reward >= 1 else "partly" if reward > 0 else "wrong"


def survived(recovery: Mapping[str, Any]) -> str:
    """Return one recovery as text: "crash of rank 1 after step 12, 1.8 s"."""
    ranks = recovery.get("ranks") or []
    who = f" of rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""
    return f"{recovery['kind']}{who} after step {recovery['step']:,}, {recovery['lost'] + recovery['seconds']:.1f} s"


def outcome(recovery: Mapping[str, Any]) -> str:
    """Return in a word if the run went on after a failure."""
    return "ended by" if recovery.get("action") == "stop" else "survived"


def behind(found: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return names and values of how far samples were behind the policy, and of their lengths; none for a synchronous
    run."""
    if not found:
        return []
    ages = {int(age): count for age, count in found["tokens"].items()}
    total = sum(ages.values()) or 1
    shares = [f"{age}: {part(count / total)}" for age, count in ages.items() if age < AGES]
    if older := sum(count for age, count in ages.items() if age >= AGES):
        shares.append(f"{AGES} and more: {part(older / total)}")
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in (found.get("dropped") or {}).items())
    versions = f"mean {number(found['mean'])}, at most {number(found['max'])}"
    counts, lengths = found["samples"], found["lengths"]
    ends = [
        f"{counts[name]:,} {fate}" + ("" if lengths[name] is None else f", {lengths[name]:.1f} tokens long")
        for name, fate in FATES.items()
        if counts[name] or name == "dropped"  # older runs have not measured all
    ]
    samples = "; ".join(ends) + (f" ({reasons})" if reasons else "")
    return [("versions behind", versions), ("tokens by them", ", ".join(shares)), ("samples", samples)]


def generation(found: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return labels and values of the figures of generation among metrics, in the order of their table."""
    known = {name: value for name in GENERATION if (value := (found or {}).get(name)) is not None}
    return [(GENERATION[name], _valued(name, value)) for name, value in known.items()]


def _valued(metric: str, value: float) -> str:
    unit = METRICS[metric].unit
    return part(value) if unit == "share" else brief(value) if unit == "s" else f"{value:,.0f}"


def updated(update: Mapping[str, Any]) -> str:
    """Return an update of a run as text: "1 of ann@host, in force after step 12: optimizer.lr was 0.1 and is 0.2"."""
    state, why = update["state"], update["why"].partition("\n")[0]
    after = "" if state == "waiting" else f" after step {update['step']:,}"
    what = "; ".join(update["changes"].values())
    return f"{update['number']} of {update['by']}, {state}{after}: {what}" + (f" ({why})" if why else "")
