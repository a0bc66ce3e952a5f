"""The native generation engine: continuous batching of requests over one model, its weights and its KV cache."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilth.config.schema import DraftConfig, LoraConfig
from tilth.core.checksum import checksum
from tilth.core.device import return_memory, to_device
from tilth.core.errors import DataError, ModelError, NonFiniteError, RecipeError
from tilth.core.layout import Box
from tilth.core.trajectory import Finish, Trajectory
from tilth.engines.adapters import AdapterBank, salt_of
from tilth.engines.ahead import RunAhead
from tilth.engines.apart import ApartDrafter
from tilth.engines.blocks import BlockManager
from tilth.engines.branches import Branches
from tilth.engines.cache import KVCache, PrefixStore, SequenceKV, Slab
from tilth.engines.draft import HOLE, NONE, Draft, Drafts, Speculation, check_said, free_positions, prices, said_by
from tilth.engines.grammar import Grammars
from tilth.engines.lanes import LengthBucket, logit_changes
from tilth.engines.lockstep import LockStep, check_divided, part_of
from tilth.engines.options import EngineOptions
from tilth.engines.pages import PagedRows, PagePool, pages_serve
from tilth.engines.protocol import EngineError, GenerationEngine
from tilth.engines.request import Progress, Request, SamplingParams, SequenceState, TextScores
from tilth.engines.runner import Decoded, DecodeStep, Runner, embedded, scored
from tilth.engines.sampling import RuleColumns, choose, draws, log_softmax
from tilth.engines.scheduler import PrefillBatch, PrefillJob, Scheduler
from tilth.engines.stats import Stats
from tilth.engines.suffix import SuffixDrafter
from tilth.models.config import DecoderConfig
from tilth.models.converters import LowRank, frozen
from tilth.models.decoder import Decoder, not_finite
from tilth.models.inputs import ModelInput
from tilth.models.parity import check_parity
from tilth.models.row_product import prepare
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import shard
from tilth.plan.kernels import CHOICE_ELEMENTS, KEYS, PAGE, PASS, ROWS, limit_for, round_up
from tilth.plan.lora import is_adapter
from tilth.trace.spans import span


class _Pass(NamedTuple):
    """Tokens of the first rows of a lane that one pass computes: T of them."""

    lane: LengthBucket
    drafts: Drafts
    given: np.ndarray
    """int64 [rows, width], the newest token of each row and its draft."""
    there: np.ndarray
    """bool [rows, width], where there is a token."""
    live: np.ndarray
    """bool [rows], rows with a sequence."""
    own: np.ndarray
    """bool [rows], those that are no run-ahead."""
    row: np.ndarray
    """int64 [T], row of each token, as its ``place`` in it and ``at``, its position."""
    place: np.ndarray
    at: np.ndarray


class Engine(GenerationEngine):
    """Native generation engine with continuous batching; weights are replaced in place.

    config: decoder to build. Raises ModelError, RecipeError or EngineError, with the key, for options that the model or
    ``options.dims`` does not allow.
    """

    tolerance: float | None = 0.0
    shares = True
    constrains = True
    adapts = True
    syncs_adapters = True
    scores = encodes = True

    def __init__(self, config: DecoderConfig, options: EngineOptions) -> None:
        dims, dtype, lora, parity = options.dims or ParallelDims.alone(), options.dtype, options.lora, options.parity
        apart = options.draft is not None and options.draft.apart
        check_divided(dims, compile=options.compile, parity=parity, apart=apart)
        multiple = check_parity(config, dtype) if parity else ROWS if options.padded else 1
        self.config, self.tokenizer, self.seed = config, options.tokenizer, options.seed
        self._special = () if self.tokenizer is None else tuple(self.tokenizer.special())
        self._grammars = None if self.tokenizer is None else Grammars(self.tokenizer, config.vocab_size)
        self.device, self.dtype = torch.device(options.device), dtype
        self._has_kernels = self.device.type == "cpu" and dtype == torch.float32
        self.max_length = options.max_length or config.max_positions
        self.step_tokens = options.step_tokens
        self.version = 0
        self.sharded = shard(
            lambda: Decoder(config, dtype).to(dtype).requires_grad_(False).eval(),
            dims,
            converters=() if lora is None else (LowRank(lora, parity), frozen),
            engine=True,
            device=str(self.device),
        )
        self.model = self.sharded.model
        self._adapters, self._based = AdapterBank(self.sharded), False
        self._held = part_of(config, dims.size("tp"))
        self._lock = LockStep(dims.group("ep", "tp"), dims.ranks("ep", "tp"))
        self.reports = not dims.coordinate("ep") and not dims.coordinate("tp")
        if not parity:  # fused, the end of a row rounds differently if the inner width is no multiple of 32
            self.model.fuse()
        self._draft, self._drafter, self._branches = options.draft, options.drafter, options.branches
        self._parity, self._routing = parity, options.routing and bool(config.num_experts)
        plain = not (parity or self._routing or options.draft)
        self._paged = plain and pages_serve(config, dtype, self.device)
        self._block_size = PAGE if self._paged else options.block_size
        kind = self._held, dtype, self.device
        self._new_dense = partial(KVCache, *kind, routing=self._routing, latent=not parity)
        self.kv_tokens = options.kv_tokens or options.max_rows * round_up(self.max_length, self._block_size)
        if options.compile and config.num_experts:
            message = f"rollout.compile does not work with the experts of family {config.family}; leave it out"
            raise RecipeError(message, key="rollout.compile")
        self._runner = Runner(self.model, parity, options.compile and not parity, self.device, multiple)
        self._max_rows = min(options.max_rows, options.step_tokens)
        self._forget_all()
        self._draw = lambda *what: draws(self.seed, *what)
        self._released = False
        self._stats = Stats()

    def _forget_all(self) -> None:
        """Reset to the state of a new engine: no requests, no KV."""
        count = -(-self.kv_tokens // PAGE) if self._paged else self.kv_tokens // self._block_size
        self._blocks = BlockManager(count, self._block_size, count // 4)
        self._scheduler = Scheduler(self._blocks, self._max_rows)
        self._new_cache()
        self._tails: dict[int, SequenceKV] = {}
        self._known: set[int] = set()
        self._speculation: Speculation | None = None
        self._ahead: RunAhead | None = None
        if self._draft is not None:
            self._speculate(self._draft)

    def _speculate(self, draft: DraftConfig) -> None:
        most = max(self._max_rows, min(self.step_tokens, CHOICE_ELEMENTS // self.config.vocab_size))
        make = self._drafter or partial(SuffixDrafter, draft.depth, branches=self._branches)
        drafter = ApartDrafter(make, self.stats) if draft.apart else make()
        free = free_positions(self.device, self.dtype)
        least = prices(self.config, self.device, free, drafter.seconds)
        self._speculation = Speculation(drafter, draft.tokens, most, self._blocks, least, self.seed)
        self._ahead = RunAhead(drafter, self._blocks, free, self._max_rows, draft.tokens, most)

    # Weights

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the live storage by the trainer's names: of each tensor the part of this rank."""
        return self.model.named_parameters()

    @torch.no_grad()
    def update_weights(
        self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], version: int, keep_kv: bool = False
    ) -> None:
        """Copy all weights into the live storage between two steps; later tokens are stamped ``version``.

        weights: whole tensors or this rank's parts, taken one by one, so a stream needs no memory for the whole; the
        live storage itself counts as written. The prefix cache is dropped. KV of sequences in flight is computed again
        under the new weights, or kept with ``keep_kv`` (faster, biased). Raises ModelError unless names and shapes
        match: for a mapping before any change; for a stream at the tensor, after which the engine is unusable.
        """
        mine = dict(self.model.named_parameters())
        if isinstance(weights, Mapping):
            for name, tensor in weights.items():
                self._check_weight(name, tensor)
            self._check_missing(mine.keys() - weights.keys())
            weights = weights.items()
        missing = set(mine)
        self._interrupt(rows=not keep_kv)
        self.reset_prefix_cache()
        for name, tensor in weights:
            self._check_weight(name, tensor)
            if tensor.shape != mine[name].shape:
                (box,) = self.sharded.boxes(name) or [Box((0,) * tensor.ndim, mine[name].shape)]
                tensor = tensor[box.slices]
            if tensor.data_ptr() != mine[name].data_ptr():
                mine[name].copy_(tensor)
            missing.discard(name)
        self._check_missing(missing)
        self.version, self._based = version, True
        self._lock.note("weights", version)
        for lane, row in self._rows():
            answer = lane.settle(row)
            answer.stamp(version)
            answer.stale = True

    def _check_missing(self, names: Set[str]) -> None:
        """Raise ModelError unless an update may leave out these weights: those of a base that is there, of adapters."""
        if first := sorted(n for n in names if is_adapter(n) or not (self._based and self.sharded.adapted)):
            message = f"weights for the engine: missing: {', '.join(first[:5])} ({len(first)} in all)"
            raise ModelError(message, key=f"{first[0]}.missing")

    def load_adapter(self, name: str, lora: LoraConfig, tensors: Mapping[str, Tensor]) -> None:
        self._adapters.load(name, lora, tensors)
        self._lock.note("adapter", name, lora, {half: checksum(tensors[half]) for half in sorted(tensors)})

    def remove_adapter(self, name: str) -> None:
        self._adapters.remove(name)
        self._lock.note("no adapter", name)

    @property
    def adapter_bytes(self) -> int:
        """Bytes of memory of the adapters that requests may name, and of what passes make of them."""
        return self._adapters.nbytes

    def _check_weight(self, name: str, tensor: Tensor) -> None:
        if name not in self.sharded.layouts:
            raise ModelError(f"weights for the engine: {name} is not in the model", key=f"{name}.extra")
        part, whole = tuple(self.sharded.parameters[name].shape), self.sharded.layouts[name].shape
        if tuple(tensor.shape) not in (part, whole):
            right = f"{whole}" if part == whole else f"{whole}, or this rank's part {part}"
            message = f"weights for the engine: {name} is {tuple(tensor.shape)}; it must be {right}"
            raise ModelError(message, key=f"{name}.shape")

    # Requests

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests. Raises DataError, and queues none of them, if one cannot be served."""
        answers = [SequenceState.start(r) for r in requests]
        seen = set(self._known)
        for answer in answers:
            self._check(answer, seen)
            seen.add(answer.request.id)
        for answer in answers:
            self._enqueue(answer)

    def resume(
        self, trajectory: Trajectory, params: SamplingParams, adapter: str = "", kv: SequenceKV | None = None
    ) -> None:
        """Continue a partial trajectory with its positions and random numbers. Raises DataError.

        kv: of its tokens, as another engine has exported it; None: it is computed, but for what is in the cache.
        """
        answer = SequenceState.resume(trajectory, params, adapter)
        self._check(answer, self._known)
        if kv is not None:
            given, mine = [(*tensor.shape[1:], tensor.dtype) for tensor in kv.tensors], self._staging.kinds
            if given != mine:
                ours, theirs = (f"{len(kinds)} tensors, the first {kinds[0]}" for kinds in (mine, given))
                raise DataError(f"KV of a sequence has {theirs}; this engine's {ours}", key="kv.shape")
            if kv.salt != self.version:
                raise DataError(f"KV of a sequence is of version {kv.salt}, not {self.version}", key="kv.version")
            self._tails[trajectory.id] = kv._replace(tensors=[tensor.to(self.device) for tensor in kv.tensors])
        self._enqueue(answer)

    @torch.inference_mode()
    def export(self, trajectory: int) -> tuple[Trajectory, SequenceKV | None]:
        """Stop a request; return its tokens and their KV, for ``resume`` in another engine with these weights.

        None: it has no row yet, or KV that another engine would compute otherwise, by an adapter or with earlier
        weights. Raises DataError.
        """
        kv, found = None, self._row_of(trajectory)
        if found is not None and not (answer := found[0].settle(found[1])).stale and answer.adapter is None:
            lane, row = found
            computed = int(lane.columns.position[row])
            kv = SequenceKV.of(lane.slab, row, answer.keys[:computed], salt_of(self.version, None), 0)
        return self.abort(trajectory), kv

    def run_ahead(self, requests: Sequence[Request]) -> None:
        if self._ahead is None:
            return
        self._end_ahead()
        self._ahead.expect(filter(self._fits, requests))
        self._lock.note("ahead", *(r.id for r in requests))

    def _fits(self, request: Request) -> bool:
        """Return True for a request that run-ahead can answer; one that nobody can is refused when it comes."""
        try:
            self._check(SequenceState.start(request), set())
        except DataError:
            return False
        return not request.media and not request.adapter

    def _end_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.tend(self._lanes.values(), True, self._draw)

    def _check(self, answer: SequenceState, seen: set[int]) -> None:
        """Raise DataError for a sequence that cannot be served. seen: ids in flight, and those that come with it."""
        r, what = answer.request, f"request {answer.request.id}"
        answer.check(self.config.vocab_size, self.max_length, seen, self.tokenizer)
        if self._blocks.blocks_for(answer.end) > self._blocks.num_blocks:
            message = f"{what}: {answer.end} tokens do not fit a KV cache of kv_tokens={self.kv_tokens}"
            raise DataError(message, key="kv_tokens")
        if r.params.schema:
            if self._grammars is None:
                raise DataError(f"{what}: a schema needs an engine with a tokenizer", key="request.schema.tokenizer")
            self._grammars.begin(r.params.schema, r.params.stop_tokens)
        answer.adapter = self._adapters.find(r.adapter, what)
        for encoder in {item.encoder for item in r.media} - self.model.encoders.keys():
            message = f"{what} has media of encoder {encoder!r}; family {self.config.family} reads"
            known = ", ".join(self.model.encoders) or "text alone"
            raise DataError(f"{message} {known}", key="request.media.encoder")

    def _enqueue(self, answer: SequenceState) -> None:
        params = answer.request.params
        answer.begin_watching(self.tokenizer, self._special, self.config.vocab_size, self._grammars)
        self._known.add(answer.request.id)
        self._scheduler.waiting.append(answer)
        self._lock.note(answer.request.id, answer.tokens, params, answer.request.adapter)

    @property
    def pending(self) -> int:
        """Number of requests in flight."""
        return len(self._known)

    @torch.inference_mode()
    def abort(self, trajectory: int) -> Trajectory:
        """Stop a request and return its tokens; its KV may still serve ``resume``. Raises DataError."""
        self._lock.note("abort", trajectory)
        answer = self._scheduler.remove(trajectory)
        if answer is None:
            found = self._row_of(trajectory)
            if found is None:
                message = f"trajectory {trajectory} is not in flight, so it cannot be aborted"
                raise DataError(message, key="trajectory")
            answer = self._vacate(*found)
        else:
            self._tails.pop(trajectory, None)
        return self._finish(answer, "aborted")

    def progress(self, seen: Mapping[int, int]) -> dict[int, Progress]:
        return {id: new for lane in self._lanes.values() for id, new in lane.progress(seen)}

    def score(self, texts: Sequence[np.ndarray], likeliest: int = 0, adapter: str = "") -> list[TextScores]:
        self._load_kernels()
        serving = partial(self._adapters.serving, [self._adapters.find(adapter, "the text to score")])
        return scored(self.model, texts, likeliest, self._parity, serving)

    def embed(self, texts: Sequence[np.ndarray], pooling: str = "last", adapter: str = "") -> list[np.ndarray]:
        self._load_kernels()
        serving = partial(self._adapters.serving, [self._adapters.find(adapter, "the text to embed")])
        return embedded(self.model, texts, pooling, self._parity, serving)

    def _load_kernels(self) -> None:
        """Load kernels for CPUs, which are built meanwhile: passes have the same bits without them."""
        if self._has_kernels:
            prepare(wait=False)

    def _rows(self) -> list[tuple[LengthBucket, int]]:
        return [(lane, row) for lane in self._lanes.values() for row in lane.rows.tolist()]

    def _row_of(self, trajectory: int) -> tuple[LengthBucket, int] | None:
        own = ((lane, row) for lane, row in self._rows() if lane.answer(row).ahead is None)
        return next(((lane, row) for lane, row in own if lane.answer(row).request.id == trajectory), None)

    # One step

    @torch.inference_mode()
    def poll(self) -> list[Trajectory]:
        """Decode a token of every running sequence, or several by a draft, then prefill within the budget; return what
        has finished."""
        if self._released:
            raise EngineError("the KV cache is released; call wake_up() before poll()", key="poll")
        self._lock.check()
        done: list[Trajectory] = []
        self._stats.steps += 1
        self._load_kernels()
        self._adapters.forget_stacks()
        self._warm_up()
        self._place(done)
        budget = self.step_tokens - self._decode(done)
        while budget > 0 and (computed := self._prefill(budget)):
            budget -= computed
            self._place(done)
        self._stats.held(self._blocks.used / self._blocks.num_blocks)
        return done

    def _warm_up(self) -> None:
        self._runner.warm_up(self._staging)
        self._stats.compile_seconds = self._runner.compile_seconds

    @property
    def running(self) -> int:
        """Number of sequences that decode."""
        return sum(int(lane.columns.live.sum()) for lane in self._lanes.values())

    def _decode(self, done: list[Trajectory]) -> int:
        """Decode a token of every row, or more by drafts; return the number of positions computed."""
        self._promote()
        if self._ahead is not None:
            self._ahead.tend(self._lanes.values(), self._scheduler.queued > 0, self._draw)
        self._secure_blocks()
        total, most = 0, self._most_drafted()
        for lane in list(self._lanes.values()):
            rows = lane.compact()
            if rows:
                rows = self._runner.rows(lane.slab, rows)
                total += self._decode_lane(lane, rows, most, done)
        return total

    def _most_drafted(self) -> int:
        """Return the tokens of a draft at most: prompts that wait have half of what plain decoding leaves of a step."""
        running = self.running
        if not self._scheduler.queued or not running:
            return self.step_tokens
        return (self.step_tokens - running) // 2 // running

    def _schedule(self, lane: LengthBucket, rows: int, most: int) -> _Pass:
        """Choose the tokens of a lane's first rows that its next pass computes. most: tokens of a draft at most."""
        c, live = lane.columns, lane.columns.live[:rows].copy()
        own, some = live.copy(), dict[int, Draft]()
        if self._speculation is not None and self._ahead is not None:
            some = self._speculation.drafts(lane, most)
            own[self._ahead.rows(lane)] = False
            self._stats.undrafted_rows += sum(not lane.answer(row).drafted for row in np.flatnonzero(own).tolist())
            self._ahead.feed(lane, some, live)
        drafts = Drafts.of(rows, some)
        given = np.concatenate([c.tokens[np.arange(rows), c.position[:rows]][:, None], drafts.tokens], 1)
        there = (given != NONE) & (live[:, None] if drafts.tokens.size else True)
        row, place = np.nonzero(there)
        return _Pass(lane, drafts, given, there, live, own, row, place, c.position[row] + drafts.depths()[row, place])

    def _run(self, scheduled: _Pass) -> Decoded:
        """Compute the tokens of a pass."""
        lane, given, there, row = scheduled.lane, scheduled.given, scheduled.there, scheduled.row
        (rows, width), adapters = given.shape, lane.adapters(len(given))
        start, uniform = lane.columns.position[:rows], lane.columns.uniform[row, scheduled.at + 1]
        if width == 1:
            step = DecodeStep(given[:, 0], start, uniform, lane.rules(slice(rows)), lane.slab.tables(rows))
            with self._adapters.serving(adapters, 1) as eager:
                return self._runner.decode(lane.slab, step, lane.slots(), eager)
        branches = Branches.of(scheduled.drafts.parents, there, self.device)
        until = int((start + there.sum(1)).max())
        lane.fit(until)
        step = DecodeStep(np.where(there, given, 0), start, uniform, lane.rules(row))
        with self._adapters.serving([adapters[r] for r in row.tolist()], 1):
            return self._runner.verify(lane.slab, step, lane.slots(until), np.flatnonzero(there), branches)

    def _postprocess(self, scheduled: _Pass, decoded: Decoded) -> tuple[np.ndarray, np.ndarray, set[int]]:
        """Draw what rows say behind the tokens of a pass, and store it.

        Returns their number of tokens, int64 [rows], the rows that end with them, and those that end by their text.
        """
        lane, drafts, there, row = scheduled.lane, scheduled.drafts, scheduled.there, scheduled.row
        places = zip(row.tolist(), scheduled.place.tolist())
        answers = [lane.answers[r] if p == 0 else None for r, p in places]
        change = logit_changes(answers, self.config.vocab_size, self.device)
        tokens, logprobs, filtered = decoded.choose(change).on_host()
        self._check_finite(logprobs[scheduled.live[row]])
        self._lock.note(tokens[scheduled.live[row]])
        chosen = _spread(tokens, there, HOLE)
        if self._ahead is not None:
            self._ahead.force(lane, chosen)
        said = said_by(chosen, drafts, lane.columns.stops[: len(there)])
        counts, tokens = said.counts * scheduled.live, said.along(chosen)
        matched = set()
        for r in lane.watched:
            if (count := lane.watch(r, tokens[r, : counts[r]].tolist())) is not None:
                matched.add(r)
                counts[r] = count
        check_said(chosen, drafts, said._replace(counts=counts))
        sampled = None if filtered is None else said.along(_spread(filtered, there, 0))
        lane.keep(said.path, counts)
        ended = lane.advance(tokens, said.along(_spread(logprobs, there, 0)), sampled, counts)
        if lane.noted:
            lane.note(decoded.logp, said.along(_spread(np.arange(len(row)), there, 0)), counts)
        if self._speculation is not None:
            self._speculation.accept(lane, tokens, counts)
        return counts, ended, matched

    def _decode_lane(self, lane: LengthBucket, rows: int, most: int, done: list[Trajectory]) -> int:
        scheduled = self._schedule(lane, rows, most)
        seen, own = scheduled.at[scheduled.live[scheduled.row]], scheduled.own
        with span("decode", tokens=len(seen), squares=int(2 * seen.sum()) + len(seen)) as decoding:
            decoded = self._run(scheduled)
        with span("sample", tokens=len(seen)) as sampling:
            counts, ended, matched = self._postprocess(scheduled, decoded)
        drawn, computed = int(counts[own].sum()), int((scheduled.there & own[:, None]).sum())
        self._stats.drafted(computed - int(own.sum()), drawn - int(own.sum()))
        self._stats.decoded(len(scheduled.row), drawn, decoding.seconds, sampling.seconds)
        if self._ahead is not None:
            self._stats.ahead_tokens += self._ahead.settle(lane, counts, ended)
        self._end_rows(lane, {*ended[own[ended]].tolist(), *matched}, matched, done)
        if self._speculation is not None:
            self._speculation.expect(lane, most)
        return len(seen)

    def _end_rows(self, lane: LengthBucket, rows: Set[int], matched: Set[int], done: list[Trajectory]) -> None:
        """Remove finished rows. matched: those that end by their text."""
        for row in sorted(rows):
            token = int(lane.columns.tokens[row, lane.columns.position[row]])
            answer = self._vacate(lane, row) if lane.answer(row).request.keeps else lane.take(row)
            self._blocks.close(answer.table)
            stopped = row in matched or token in answer.request.params.stop_tokens
            done.append(self._finish(answer, "stop" if stopped else "length"))

    def _finish(self, answer: SequenceState, reason: Finish) -> Trajectory:
        self._known.discard(answer.request.id)
        if self._speculation is not None:
            self._speculation.forget(answer)
        self._stats.finished += 1
        return answer.finish(reason, self.tokenizer)

    # Prompts

    def _prefill(self, budget: int) -> int:
        """Compute the next chunk of prompts; return its number of tokens, 0 if nothing can be done now."""
        scheduler = self._scheduler
        if scheduler.batch is None:
            if scheduler.ready or not scheduler.waiting:
                return 0
            prompts = scheduler.admit(min(budget, PASS), self.running, self.version)
            if not prompts:
                return 0
            for prompt in prompts:
                self._take_tail(prompt)
            scheduler.batch = PrefillBatch(prompts, self._staging)
            self._load_prefixes(prompts)
        return self._prefill_chunk(scheduler.batch, budget)

    def _take_tail(self, prompt: PrefillJob) -> None:
        """Use the kept tail of the only sequence of a prompt, if it has one."""
        tail, *_ = [self._tails.pop(answer.request.id, None) for answer in prompt.answers]
        if (
            tail is not None
            and len(prompt.answers) == 1
            and tail.continues(prompt.keys, salt_of(self.version, prompt.adapter), prompt.computed)
        ):
            prompt.tail, prompt.computed = tail, len(tail.tokens)

    def _keep_tail(self, answer: SequenceState, slab: Slab, row: int, computed: int) -> None:
        """Keep the KV behind the last full block, if a later request begins with these tokens."""
        if answer.request.keeps and (start := computed - computed % self._block_size) < computed:
            salt = salt_of(self.version, answer.adapter)
            self._tails[answer.request.id] = SequenceKV.of(slab, row, answer.keys[:computed], salt, start)

    def _load_prefixes(self, prompts: list[PrefillJob]) -> None:
        for prompt in prompts:
            self._store.load(self._blocks.slots(prompt.table), self._staging, prompt.row)
            if prompt.tail is not None:
                prompt.tail.load(self._staging, prompt.row, prompt.table.cached)
            self._stats.cached_tokens += prompt.computed
            self._stats.shared_tokens += (len(prompt.answers) - 1) * len(prompt.tokens)

    def _prefill_chunk(self, batch: PrefillBatch, budget: int) -> int:
        chunk = batch.chunk(budget)
        ids, start, length = batch.inputs(chunk)
        ending = [row for row, p in enumerate(batch.prompts) if chunk[row] == p.remaining]
        last = np.array([row * ids.shape[1] + chunk[row] - 1 for row in ending], np.int64)
        squares = int((((start + chunk) ** 2) - start**2).sum())
        with span("prefill", tokens=int(chunk.sum()), squares=squares) as spent:
            tokens, first, ends, *tables = to_device([ids, start, last, *batch.slab.tables(len(ids))], self.device)
            given = ModelInput(tokens, media=batch.media(chunk, ids.shape[1], self.device))
            with self._adapters.serving([p.adapter for p in batch.prompts], ids.shape[1]):
                logits = self._runner.prefill(batch.slab, given, first, length, ends, tables)
        for i, row in enumerate(ending):
            batch.prompts[row].logits = logits[i : i + 1]
        for prompt, count in zip(batch.prompts, chunk.tolist()):
            prompt.computed += count
        self._stats.prefilled_tokens += spent.tokens
        self._stats.prefill_seconds += spent.seconds
        if batch.finished:
            for prompt in batch.prompts:
                salt = salt_of(self.version, prompt.adapter)
                new = self._blocks.register(prompt.table, prompt.keys, prompt.computed, salt)
                self._store.save(new, batch.slab, prompt.row)
            self._scheduler.computed()
        return spent.tokens

    def _place(self, done: list[Trajectory]) -> None:
        """Draw the first tokens of sequences whose prompt is computed, and place them in rows."""
        placed = self._scheduler.place(self.running)
        if not placed:
            return
        if isinstance(self._store, PagePool):
            self._store.fork([(p.table.blocks[-1], a.table.blocks[-1]) for p, a in placed])
        with span("place", tokens=len(placed)) as spent:
            rows = max(1, CHOICE_ELEMENTS // self.config.vocab_size)
            for i in range(0, len(placed), rows):
                self._first_tokens(placed[i : i + rows])
            going: dict[int, list[tuple[PrefillJob, SequenceState]]] = {}
            for prompt, answer in placed:
                if (reason := self._ended(answer)) is not None:
                    answer.keep_routing(self._staging, prompt.row, len(prompt.tokens))
                    self._keep_tail(answer, self._staging, prompt.row, len(prompt.tokens))
                    self._blocks.close(answer.table)
                    done.append(self._finish(answer, reason))
                    continue
                if self._speculation is not None:
                    self._speculation.begin(answer)
                going.setdefault(self._limit(len(answer.tokens)), []).append((prompt, answer))
            for limit, pairs in going.items():
                self._lane(limit).place([a for _, a in pairs], self._staging, [p.row for p, _ in pairs], self._draw)
        self._stats.decoded_tokens += len(placed)
        self._stats.place_seconds += spent.seconds

    def _first_tokens(self, placed: Sequence[tuple[PrefillJob, SequenceState]]) -> None:
        logits = torch.cat([p.logits for p, _ in placed if p.logits is not None])
        answers = [a for _, a in placed]
        uniform = self._draw([a.request for a in answers], [len(a.tokens) for a in answers], 1)[:, 0]
        columns = RuleColumns.of([a.request.params for a in answers])
        numbers, *tensors = to_device([uniform, *columns.tensors], self.device)
        rules, change = columns.on(tensors), logit_changes(answers, logits.shape[1], self.device)
        tokens, logprobs, sampling = choose(logits, numbers, rules, change).on_host()
        self._check_finite(logprobs)
        self._lock.note(tokens)
        for i, answer in enumerate(answers):
            some = slice(i, i + 1)
            answer.stamp(self.version)
            answer.stale = False
            answer.append(tokens[some], logprobs[some], None if sampling is None else sampling[some])
            if answer.request.likeliest:
                answer.note(log_softmax(logits[some], rules.temperature[some])[0])

    def _ended(self, answer: SequenceState) -> Finish | None:
        """Return the finish reason of a sequence after its newest token; None if it continues."""
        token = int(answer.tokens[-1])
        if answer.watch(token) or token in answer.request.params.stop_tokens:
            return "stop"
        return "length" if len(answer.tokens) >= answer.end else None

    # Room

    def _secure_blocks(self) -> None:
        """Allocate a block for every row whose next token begins one; preempt the newest if there are too few."""
        needy = []
        for lane in self._lanes.values():
            c = lane.columns
            for row in np.flatnonzero(c.live & (c.position % self._block_size == 0)).tolist():
                if (answer := lane.answer(row)).ahead is None:
                    needy.append((answer.order, lane, row, answer))
        for _, lane, row, answer in sorted(needy, key=lambda n: n[0]):
            while lane.answers[row] is answer and not self._blocks.extend(
                answer.table, int(lane.columns.position[row]) + 1
            ):
                self._make_room()
            if lane.answers[row] is answer:
                lane.slab.bind(row, answer.table.blocks)

    def _make_room(self) -> None:
        if self._scheduler.yield_prompt():
            return
        lane, row = max(self._rows(), key=lambda found: found[0].answer(found[1]).order)
        self._scheduler.requeue([self._vacate(lane, row)])
        self._stats.preemptions += 1

    def _vacate(self, lane: LengthBucket, row: int) -> SequenceState:
        """Remove a row; its full blocks stay in the prefix store while there is room."""
        computed = int(lane.columns.position[row])
        answer = lane.settle(row)
        if not answer.stale:
            new = self._blocks.register(answer.table, answer.keys, computed, salt_of(self.version, answer.adapter))
            self._store.save(new, lane.slab, row)
            self._keep_tail(answer, lane.slab, row, computed)
        lane.take(row)
        self._blocks.close(answer.table)
        return answer

    def _promote(self) -> None:
        """Move rows that outgrew their lane to the next one."""
        for lane in sorted(self._lanes.values(), key=lambda lane: -lane.limit):
            rows = lane.outgrown()
            if len(rows):
                self._lane(self._limit(lane.limit)).adopt(lane, rows, self._draw)
                self._stats.moved_rows += len(rows)

    def _interrupt(self, rows: bool = True) -> None:
        """Requeue prompts, and rows if ``rows``, to compute them again; run-ahead ends."""
        self._end_ahead()
        while self._scheduler.yield_prompt():
            pass
        answers = [lane.take(row) for lane, row in self._rows()] if rows else []
        for answer in answers:
            self._blocks.close(answer.table)
        self._scheduler.requeue(sorted(answers, key=lambda a: a.order))

    def reset_prefix_cache(self) -> None:
        self._blocks.flush()
        self._tails.clear()

    def sleep(self) -> None:
        self._interrupt()
        self.reset_prefix_cache()
        self._new_cache()
        self._released = True
        if self._speculation is not None:
            self._speculation.sleep()
        return_memory(self.device)

    def wake_up(self) -> None:
        self._released = False

    @property
    def kv_bytes(self) -> int:
        """Bytes of memory of the KV cache, held until ``sleep``."""
        slabs = [self._staging, *(lane.slab for lane in self._lanes.values())]
        return self._store.nbytes + sum(slab.nbytes for slab in slabs)

    def stats(self, reset: bool = False) -> Stats:
        """Return counts so far; reset: start a new count."""
        found = self._stats
        if reset:
            self._stats = Stats()
        return found

    def _limit(self, length: int) -> int:
        """Return the limit of the lane for sequences of a length: over pages one lane has them all."""
        return round_up(self.max_length, KEYS) if self._paged else limit_for(length, self.max_length)

    def _lane(self, limit: int) -> LengthBucket:
        if limit not in self._lanes:
            fixed, trimmed = self.device.type == "cuda", not self._runner.compiled  # compiled code counts by eights
            made = LengthBucket(limit, self._new_slab(), self._max_rows, fixed=fixed, trimmed=trimmed)
            self._lanes[limit] = made
        return self._lanes[limit]

    def _new_cache(self) -> None:
        self._lanes: dict[int, LengthBucket] = {}
        self._store: PrefixStore | PagePool
        if self._paged:
            self._store = PagePool(self._held, self.dtype, self.device, self._blocks.num_blocks)
        else:
            self._store = PrefixStore(self._new_dense(), self._block_size, self._blocks.max_cached)
        self._staging = self._new_slab()

    def _new_slab(self) -> Slab:
        return PagedRows(self._store) if isinstance(self._store, PagePool) else self._new_dense()

    def _check_finite(self, logprobs: np.ndarray) -> None:
        if not np.isfinite(logprobs).all():
            self._forget_all()
            wrong = not_finite(self.model.named_parameters())
            why = f": of the weights {wrong} is not finite" if wrong else ""
            what = f"the engine's logits are not finite under weights of version {self.version}{why}"
            raise NonFiniteError(f"{what}; requests in flight are dropped", key="logits")


def _spread(values: np.ndarray, there: np.ndarray, other: int) -> np.ndarray:
    """Return values [T] at the places of a table that are ``there``, and another one elsewhere."""
    found = np.full(there.shape, other, values.dtype)
    found[there] = values
    return found
