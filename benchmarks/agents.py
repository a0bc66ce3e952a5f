"""Episodes of several turns: turns that interleave with generation, beside a loop that steps a batch in lockstep.

    python benchmarks/agents.py [--quick] [--json PATH] [--episodes N] [--turns N]

With a Python that has TRL (``rl_vs_trl.py`` shows how to make one) its environment support plays a quarter of the
episodes too, see ``agents_trl.py``.

Engine, template, pool of environments and episodes are the same for both loops, and so are the trajectories: ids,
log-probs and rewards are compared before anything is timed (parity mode). The lockstep loop generates a turn of every
episode, then waits until every environment has answered: all episodes at once, or as many as the engine has rows, batch
after batch. Tools: none (calculator), or one with lognormal latency, 0.01 to 2 s, of p99 / p50 = SPREAD. Idle: share of
the time in which the engine has nothing to do. Recomputed: prompt tokens computed beyond those that were new.
"""

import string
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from driver import benchmark_parser, write_rows
from work import same_work

from tilth.core.trajectory import Segment, Trajectory
from tilth.data.template import PlainTemplate
from tilth.data.tokenizer import Tokenizer
from tilth.engines.engine import Engine
from tilth.engines.options import EngineOptions
from tilth.engines.request import Request, SamplingParams
from tilth.envs.pool import EnvironmentPool
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.rollout.buffer import TrajectoryBuffer, joined
from tilth.rollout.episodes import EpisodeRequest, EpisodeResult, Limits, Player

ENVIRONMENT = f"{Path(__file__).with_name('agents_env.py')}:Waiting"
SPREAD = 50.0
ROWS = 64
CONTEXT = 512
TOOLS = {"none": 0.0, "heavy-tailed latency": 0.02}
"""Tool -> seconds of its median call."""


class Timed:
    """A pool that counts the seconds in which somebody waits for it with nothing else to do."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self.pool, self.idle = pool, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    def poll(self, seconds: float) -> list[Any]:
        began = time.perf_counter()
        found = self.pool.poll(seconds)
        self.idle += time.perf_counter() - began if seconds else 0.0
        return found


class Lockstep:
    """The usual loop: a turn of all episodes, then all environments, then the next turn."""

    def __init__(self, player: Player, batch: int) -> None:
        self.player, self.batch = player, batch

    def play(self, requests: list[EpisodeRequest], params: SamplingParams) -> list[Trajectory]:
        parts = [requests[i : i + self.batch] for i in range(0, len(requests), self.batch)]
        return [t for part in parts for t in self._play(part, params)]

    def _play(self, requests: list[EpisodeRequest], params: SamplingParams) -> list[Trajectory]:
        one, made = self.player, {ask.id: TrajectoryBuffer() for ask in requests}
        for ask in requests:
            one.pool.begin(ask.id, ask.info)
        answers = self._all([ask.id for ask in requests])
        going = {i: np.array(one.template.begin(a["messages"]), np.int64) for i, a in answers.items()}
        while going:
            turns = [Request(i, going[i], params, keeps=True) for i in sorted(going)]
            for t in one.engine.generate(turns):
                made[t.id].take(t)
                ended = int(t.tokens[-1]) in params.stop_tokens
                text = one.tokenizer.decode(t.tokens[t.prompt_length : len(t.tokens) - ended].tolist(), special=True)
                one.pool.step(t.id, {"role": "assistant", "content": text})
            answers = self._all(list(going))
            going = {}
            for i, answer in answers.items():
                if not answer["done"] and made[i].finish == "stop":
                    made[i].read("user", one.template.follow(answer["messages"]))
                    going[i] = made[i].tokens
        for ask in requests:
            one.pool.reward(ask.id)
        found = {ask.id: joined(ask.id, ask.prompt, ask.group, [made[ask.id]], 0, cut=False) for ask in requests}
        for i, score in self._all(list(found)).items():
            found[i].reward = score["value"]
            one.pool.end(i)
        return list(found.values())

    def _all(self, ids: list[int]) -> dict[int, Any]:
        found = dict[int, Any]()
        while len(found) < len(ids):
            found |= {a.episode: a.value for a in self.player.pool.poll(10.0)}
        return found


@contextmanager
def playing(parity: bool) -> Iterator[Player]:
    """Make an engine with a small random model, and the environments beside it."""
    tokenizer = Tokenizer.characters(string.digits + "+*=;?")
    config = DecoderConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=128, intermediate_size=256, num_layers=4, num_heads=4,
        max_positions=CONTEXT,
    )  # fmt: skip
    model = Decoder(config)
    model.init_weights_(0)
    kv_tokens = ROWS * CONTEXT * 8
    options = EngineOptions(tokenizer=tokenizer, max_rows=ROWS, max_length=CONTEXT, parity=parity, kv_tokens=kv_tokens)
    engine = Engine(config, options)
    engine.update_weights(dict(model.named_parameters()), version=1)
    pool: Any = Timed(EnvironmentPool(ENVIRONMENT, workers=1, timeout=30.0))
    try:
        yield Player(engine, PlainTemplate(tokenizer), tokenizer, pool, Limits(100, CONTEXT))
    finally:
        pool.close()


def asked(count: int, turns: int, middle: float) -> list[EpisodeRequest]:
    """Return episodes with their records."""
    about = {"turns": turns, "middle": middle, "spread": SPREAD}
    return [EpisodeRequest(i, {"prompt": f"{i}*{i}=?", "number": i, **about}) for i in range(count)]


def trajectories(found: list[Any]) -> list[Trajectory]:
    return [one.trajectory if isinstance(one, EpisodeResult) else one for one in found]


def check_equal(ours: list[Trajectory], theirs: list[Trajectory]) -> None:
    """Raise AssertionError unless both loops made the same episodes."""
    for a, b in zip(ours, theirs, strict=True):
        n = len(a.tokens)  # what follows the policy's last turn is left out
        assert np.array_equal(a.tokens, b.tokens[:n]) and not b.mask[n:].any() and a.reward == b.reward, a.id
        assert np.array_equal(a.logprobs, b.logprobs[:n]) and [Segment(*s) for s in a.segments] == b.segments, a.id


def measured(player: Player, loop: Any, requests: list[EpisodeRequest], params: SamplingParams) -> dict[str, float]:
    """Play the episodes and return rates."""
    player.engine.reset_prefix_cache()
    player.engine.stats(reset=True)
    pool: Any = player.pool
    pool.idle, began = 0.0, time.perf_counter()
    found = trajectories(loop.play(requests, params))
    seconds, stats = time.perf_counter() - began, player.engine.stats()
    read = sum(int((t.mask == 0).sum()) for t in found)
    turns = sum(int(t.reward or 0) for t in found)
    return {
        "seconds": seconds,
        "generated_tokens": sum(int(t.mask.sum()) for t in found),
        "turns_played": turns,
        "episodes_per_second": len(found) / seconds,
        "idle_share": pool.idle / seconds,
        "tokens_recomputed_per_turn": max(0, stats.prefilled_tokens - read - (turns - len(found))) / turns,
    }


WORK = ("episodes", "turns_played", "generated_tokens")


def beside_trl(count: int, turns: int) -> Iterator[dict[str, Any]]:
    """Play episodes with a tool here and in TRL, and check that their ids are equal. Yields rows."""
    import agents_trl

    with tempfile.TemporaryDirectory() as folder:
        agents_trl.make_model(Path(folder))
        for tool, middle in TOOLS.items():
            infos = [one.info for one in asked(count, turns, middle)]
            with agents_trl.playing(Path(folder), ROWS) as player:
                player.pool = Timed(player.pool)  # type: ignore[assignment]
                params = SamplingParams(max_tokens=64, stop_tokens=player.template.stops)
                ours = player.play([EpisodeRequest(i, info) for i, info in enumerate(infos)], params)
                row = measured(player, player, [EpisodeRequest(i, info) for i, info in enumerate(infos)], params)
            seconds, ids = agents_trl.trl_plays(Path(folder), infos)
            for result, theirs in zip(ours, ids, strict=True):
                t = result.trajectory
                assert t.tokens[t.prompt_length :].tolist() == theirs, (t.id, len(theirs), len(t.tokens))
            own = sum(len(p.trajectory.tokens) - p.trajectory.prompt_length for p in ours)
            same_work({"tilth": {"tokens": own}, "trl": {"tokens": sum(map(len, ids))}})
            about = {"tool": tool, "episodes": count, "turns": turns}
            yield {**about, "loop": "tilth", **row}
            yield {**about, "loop": "trl", "seconds": seconds, "episodes_per_second": count / seconds}
            print(
                f"{tool:22s} tilth {row['episodes_per_second']:.2f} episodes/s, TRL {count / seconds:.2f}: "
                f"{seconds / row['seconds']:.1f} times as long; {count} equal episodes of {turns} calls"
            )


def main() -> None:
    parser = benchmark_parser(__doc__, "96 episodes of 4 turns")
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--turns", type=int, default=8)
    options = parser.parse_args()
    count, turns = (96, 4) if options.quick else (options.episodes, options.turns)
    rows: list[dict[str, Any]] = []
    with playing(parity=True) as player:
        params = SamplingParams(max_tokens=12, stop_tokens=(1, 2, 3, 4, 5, 6))
        requests = asked(24, 3, 0.0)
        check_equal(trajectories(player.play(requests, params)), Lockstep(player, 24).play(requests, params))
    print(f"equal episodes; now {count} of {turns} turns, engine of {ROWS} rows")
    with playing(parity=False) as player:
        player.play(asked(8, 2, 0.0), params)
        for tool, middle in TOOLS.items():
            requests = asked(count, turns, middle)
            loops = {
                "interleaved": player,
                "lockstep": Lockstep(player, count),
                f"lockstep of {ROWS}": Lockstep(player, ROWS),
            }
            for name, loop in loops.items():
                found = measured(player, loop, requests, params)
                rows.append({"tool": tool, "loop": name, "episodes": count, "turns": turns, **found})
                done = {r["loop"]: {kind: r[kind] for kind in WORK} for r in rows if r["tool"] == tool}
                same_work(done)
                ratio = rows[-1]["seconds"] / next(r["seconds"] for r in rows if r["tool"] == tool)
                print(
                    f"{tool:22s} {name:16s} {found['episodes_per_second']:7.1f} episodes/s  {ratio:5.2f} times as long"
                    f"  idle {found['idle_share']:.2f}  recomputed {found['tokens_recomputed_per_turn']:.2f} a turn"
                )
    if find_spec("trl"):
        rows += beside_trl(count // 4, turns)
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
