"""Factories of roles, called in the workers with a context and the recipe."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from tilth.cluster.backends.capacity import core_share, cores
from tilth.cluster.backends.session_dir import SessionDir
from tilth.cluster.worker.context import Context
from tilth.config.roles import ROLES, SHIPPED_ROLES, resolve
from tilth.config.schema import LoraConfig, OptimizerConfig, Recipe
from tilth.core.errors import RecipeError
from tilth.core.layout import Layout, Mesh
from tilth.data.alignment import Translator
from tilth.data.documents import Corpus
from tilth.data.prompts import PromptSet
from tilth.data.template import Tools, data_template, make_template
from tilth.data.tokenizer import Tokenizer
from tilth.engines.draft_model import ModelDrafter
from tilth.engines.options import EngineOptions
from tilth.engines.protocol import GenerationEngine, make_engine
from tilth.envs.pool import EnvironmentPool
from tilth.flows.weight_sync import DTYPES
from tilth.launch.loader_plans import source_loaders
from tilth.models.config import DecoderConfig
from tilth.models.converters import HEAD, Converter, LowRank
from tilth.models.decoder import Decoder
from tilth.models.parity import check_parity
from tilth.parallel.dims import ParallelDims, join
from tilth.parallel.local import reducer_of
from tilth.parallel.reshard import whole_layout
from tilth.parallel.sharded import ShardedModel, shard
from tilth.plan.layout import layouts, policy_layouts, tp_part
from tilth.plan.lora import is_adapter
from tilth.plan.memory import has_relay
from tilth.plan.offload import HostRates, OffloadLimits
from tilth.plan.shape import layer_flops
from tilth.plan.working import LargestMicroBatch, ShardFactors, layer_bytes
from tilth.rewards.process_pool import RewardPool
from tilth.roles.critic import CriticWorker
from tilth.roles.judge import JudgeWorker
from tilth.roles.loader import DocumentLoader, PromptLoader
from tilth.roles.pairs import PairPolicyWorker, RatingWorker, RewardModelWorker
from tilth.roles.policy import PolicyWorker
from tilth.roles.reference import ReferenceWorker
from tilth.roles.relay_sync import RelaySyncWorker
from tilth.roles.reward import RewardWorker
from tilth.roles.rollout import COUNTED, DIVIDED, RolloutWorker
from tilth.roles.teacher import TeachersWorker, TeacherWorker
from tilth.roles.trajectory_writer import TrajectoryWriter
from tilth.roles.weight_sync import WeightSyncWorker
from tilth.rollout.episodes import Limits, Player
from tilth.runs.models import REWARD_MODEL, load_beginning, load_model, wants_tokenizer
from tilth.training.engine import TrainEngine
from tilth.training.experts import ExpertOptions
from tilth.training.packed import appraise, rate
from tilth.training.rate import host_bandwidth, measured_flops

VALUES = ("value_head",)
HOST_PART = 0.5
"""Share of the available host memory that activations may take."""


def policy(context: Context, recipe: Recipe, config: DecoderConfig) -> PolicyWorker | RewardModelWorker:
    """Make the policy, from ``model.path`` or new; in flow reward_model it is a reward model."""
    value, more = recipe.flow_spec.value, {"ema": recipe.train.ema, "watch": recipe.train.watch}
    adapters = _adapters(recipe.policy.lora, recipe, "policy")
    sharded = shard_model(context, recipe, config, converters=(*(VALUES if value else ()), *adapters))
    if recipe.model.path:
        sharded.init_(recipe.seed, [name for name in sharded.layouts if is_adapter(name)])
        sharded.load_(load_beginning(recipe).tensors)
    else:
        sharded.init_(recipe.seed)
    if value:
        return RewardModelWorker(train_engine(recipe, sharded, recipe.optimizer, scorer=rate, **more), context.store)
    engine = train_engine(recipe, sharded, recipe.optimizer, **more)
    kind = PairPolicyWorker if recipe.flow_spec.learns == "pairs" else PolicyWorker
    return kind(engine, context.store, temperature=_temperature(recipe))


def _adapters(lora: LoraConfig, recipe: Recipe, role: str) -> tuple[Converter, ...]:
    """Return the converter that gives a role adapters, if it has some; in parity mode it computes with merged weights,
    as engines do."""
    return (LowRank(lora, recipe.train.parity, f"{role}.lora.targets"),) if lora.rank else ()


def reward_model(context: Context, recipe: Recipe) -> RatingWorker:
    """Make the reward model of ``reward.model``."""
    loaded = load_model(recipe.reward.model, REWARD_MODEL)
    sharded = shard_model(context, recipe, loaded.config, converters=(*VALUES, "frozen"))
    sharded.load_(loaded.tensors)
    return RatingWorker(
        sharded,
        context.store,
        weight=recipe.reward.model_weight,
        micro_tokens=recipe.train.micro_tokens,
        parity=recipe.train.parity,
    )


def critic(context: Context, recipe: Recipe, config: DecoderConfig) -> CriticWorker:
    """Make the value model. It gets the policy's weights at the start of its first phase."""
    adapters = _adapters(recipe.critic.lora, recipe, "critic")
    sharded = shard_model(context, recipe, config, converters=(*VALUES, *adapters))
    sharded.init_(recipe.seed)
    section = recipe.optimizer.model_copy(update={"lr": recipe.critic.lr})
    engine = train_engine(recipe, sharded, section, scorer=appraise)
    return CriticWorker(engine, context.store, clip=recipe.critic.clip)


def reference(
    context: Context, recipe: Recipe, config: DecoderConfig, tokenizer: Tokenizer
) -> ReferenceWorker | TeachersWorker:
    """Make the model of ``reference.path``, those of ``reference.teachers``, or a frozen copy of the policy, updated at
    the start of each phase.

    With ``align = "characters"`` of the estimator a teacher translates the policy's tokens to its own.
    """
    make = partial(_reference, context, recipe, config, tokenizer)
    if not recipe.reference.teachers:
        return make(recipe.reference.path, aligns=recipe.aligns)
    return TeachersWorker({each.name: make(each.path, aligns=each.aligns) for each in recipe.teachers})


def _reference(
    context: Context, recipe: Recipe, config: DecoderConfig, tokenizer: Tokenizer, path: str, *, aligns: bool
) -> ReferenceWorker:
    loaded = load_model(path) if path else None
    shape = config if loaded is None else loaded.config
    sharded = shard_model(context, recipe, shape, converters=("frozen",))
    if loaded is None:
        sharded.init_(recipe.seed)
    else:
        sharded.load_(loaded.tensors)
    micro, units = recipe.train.micro_tokens, context.mesh.units
    how: dict[str, Any] = {"temperature": _temperature(recipe), "micro_tokens": micro, "parity": recipe.train.parity}
    if loaded is None or not aligns:
        return ReferenceWorker(sharded, context.store, **how)
    most = min(shape.max_positions, micro * units) if units > 1 else shape.max_positions
    translator = Translator(tokenizer, wants_tokenizer(loaded), most)
    return TeacherWorker(sharded, context.store, translator=translator, **how)


def rollout(context: Context, recipe: Recipe, config: DecoderConfig, tokenizer: Tokenizer) -> RolloutWorker:
    """Make this worker's engine, or its part of one; weight sync brings its weights."""
    r = recipe.rollout
    more: dict[str, Any] = {"kv_tokens": r.kv_tokens, "max_length": recipe.model.context}
    more |= {"compile": r.compile, "parity": recipe.train.parity}
    if config.num_experts and recipe.train.routing != "own" and recipe.flow_spec.samples:
        more["routing"] = True
    if r.adapters == "adapter":
        more["lora"] = recipe.policy.lora
    if r.speculate != "off":
        more |= {"draft": r.draft, "branches": r.speculate == "tree"}
    if r.speculate == "model":
        more["drafter"] = partial(
            model_drafter,
            r.draft.path,
            dtype=DTYPES[recipe.train.precision],
            device=str(prepare(context, recipe)),
            tokens=r.draft.tokens,
            layers=config.num_layers,
        )
    engine = _engine(context, recipe, config, tokenizer, **more)
    goes_on = "staleness" if r.staleness else "partial" if r.partial and not r.environment else ""
    if goes_on and not hasattr(engine, "resume"):
        raise RecipeError(
            f"rollout.{goes_on} = {getattr(r, goes_on)}: rollout.engine = {r.engine} cannot resume a completion; use "
            "native",
            key="rollout.engine.resume",
        )
    template = data_template(recipe.data, tokenizer)
    counted = bool(r.staleness) and recipe.cluster.backend == "inline"  # where a clock would decide what is in flight
    player = None
    if r.environment:
        pool = EnvironmentPool(
            r.environment,
            workers=r.environments,
            timeout=r.turn_seconds,
            plugins=recipe.plugins,
            rollout=r.model_dump(include={"serve", "temperature", "top_k", "top_p", "min_p", "tool_schemas"}),
        )
        limits = Limits(r.turns, recipe.model.context)
        how = {"constrained": r.tool_schemas, "lockstep": counted}
        player = Player(engine, template, tokenizer, pool, limits, **how)
    rounds = DIVIDED if context.mesh.size("ep", "tp") > 1 else COUNTED if counted else None
    return RolloutWorker(engine, template, r, context.store, player, context.rank, rounds)


def model_drafter(path: str, *, dtype: torch.dtype, device: str, tokens: int, layers: int) -> ModelDrafter:
    """Make the drafter of ``rollout.draft.path``, for a target of so many layers."""
    loaded = load_model(path)
    return ModelDrafter(loaded.config, loaded.tensors, dtype=dtype, device=device, tokens=tokens, layers=layers)


def _engine(
    context: Context, recipe: Recipe, config: DecoderConfig, tokenizer: Tokenizer, **more: Any
) -> GenerationEngine:
    r = recipe.rollout
    if context.mesh.size("ep", "tp") > 1:
        more |= {"dims": ParallelDims.of(context.mesh, context.rank, context.generation)}
    more |= {"device": prepare(context, recipe), "dtype": DTYPES[recipe.train.precision], "seed": recipe.seed}
    more |= {"max_rows": r.max_rows, "step_tokens": r.step_tokens, "patience": recipe.guard.hang_after}
    options = EngineOptions(tokenizer=tokenizer, python=r.python, arguments=r.options, **more)
    return make_engine(r.engine, config, options)


def reward(context: Context, pool: RewardPool) -> RewardWorker:
    """Make the role that scores in a pool of processes, on the loader's worker."""
    return RewardWorker(pool, _prompts(context), context.store)


def writer(context: Context, recipe: Recipe, tokenizer: Tokenizer | None) -> TrajectoryWriter:
    """Make the role that writes trajectories, on the loader's worker."""
    decoder = tokenizer if recipe.rollout.environment else None
    return TrajectoryWriter(_prompts(context), context.store, decoder)


def _prompts(context: Context) -> PromptSet:
    """Return the prompts of this worker's loader, so that they are sent once."""
    loader: Any = context.roles["loader"]
    prompts: PromptSet = loader.prompts
    return prompts


def judge(context: Context, recipe: Recipe, prompts: PromptSet | None = None) -> JudgeWorker:
    """Make this worker's engine, or its part of one, with the fixed weights of ``judge.path``; their step is its
    version.

    One that grades begins while others generate where its replies do not depend on what is generated beside them, so
    that the order of finishing changes none: in parity mode, which the native engine has on the CPU of one rank.
    """
    loaded = load_model(recipe.judge.path)
    tokenizer = wants_tokenizer(loaded)
    whole = context.mesh.size("ep", "tp") == 1 and recipe.rollout.engine == "native"
    early = recipe.grades and whole and prepare(context, recipe).type == "cpu"
    engine = _engine(context, recipe, loaded.config, tokenizer, **({"parity": True} if early else {}))
    engine.update_weights(loaded.tensors.items(), version=loaded.step or 0)
    share = context.mesh.ranks.index(context.rank), len(context.mesh)
    template = make_template(loaded.template, tokenizer)
    return JudgeWorker(engine, template, recipe.judge, context.store, prompts if early else None, share)


def loader(
    context: Context,
    recipe: Recipe,
    tokenizer: Tokenizer,
    prompts: PromptSet | None = None,
    train: Corpus | None = None,
    heldout: Corpus | None = None,
    tools: Tools = (),
) -> PromptLoader | DocumentLoader:
    """Make the role that turns prompts, answers, pairs, or pieces of documents into payload.

    tools: of the environment, listed in prompts and examples whose record lists none.
    """
    if prompts is None:
        assert train is not None
        return DocumentLoader(train, heldout, tokenizer, context.store)
    template = data_template(recipe.data, tokenizer, tools, prompts.starts)
    episodes = bool(recipe.rollout.environment)
    loaders = source_loaders(recipe, prompts, tokenizer, tools)
    return PromptLoader(prompts, template, recipe.model.context, context.store, episodes=episodes, loaders=loaders)


def plugin_role(context: Context, recipe: Recipe, given: Mapping[str, Any]) -> Any:
    """Make a role that a plugin declares, with the arguments it asks for and its options."""
    return resolve(ROLES[context.role].worker)(context, **given, **recipe.section(ROLES[context.role].key).options)


def weight_sync(
    context: Context, recipe: Recipe, config: DecoderConfig, source: Mesh, targets: dict[str, Mesh]
) -> WeightSyncWorker:
    """Make the role that copies the policy's weights: to engines in their dtype, by a relay where they generate beside
    it, to other roles in fp32."""
    device, engine = prepare(context, recipe), DTYPES[recipe.train.precision]
    dtypes = {name: engine if ROLES[name].mesh in ("copies", "engines") else torch.float32 for name in targets}
    held = policy_layouts(recipe, config, source, schedule=recipe.policy.layout.pp_schedule)
    layouts_of = {name: _target_layouts(recipe, config, name, mesh) for name, mesh in targets.items()}
    given = context, held, layouts_of, dtypes, source, targets
    if not has_relay(recipe) or "rollout" not in targets:
        return WeightSyncWorker(*given, device=device)
    if context.folder:
        return RelaySyncWorker(*given, device=device, relays={"rollout": Path(context.folder) / "relay"})
    session = SessionDir.create()  # inline
    return RelaySyncWorker(*given, device=device, relays={"rollout": session.path / "relay"}, session=session)


def _target_layouts(recipe: Recipe, config: DecoderConfig, role: str, mesh: Mesh) -> dict[str, Layout]:
    """Return the layouts in which a role takes the policy's weights: its own parts, whole ones for a plugin's role."""
    spec = ROLES[role]
    how: dict[str, Any] = {"value": spec.values, "schedule": spec.placed_by(recipe).layout.pp_schedule}
    if role == "rollout":
        return policy_layouts(recipe, config, mesh, schedule=how["schedule"], engine=True)
    whole = spec.mesh == "engines" or spec.placed_by(recipe).layout.zero == 1
    found = layouts(config, mesh, whole=whole, **how)
    if role not in SHIPPED_ROLES:
        return {name: whole_layout(layout, mesh) for name, layout in found.items()}
    return {name: layout for name, layout in found.items() if not name.startswith(HEAD)}


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device of ``train.device`` for a worker by its number on its machine; RecipeError if missing."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RecipeError(
            f"train.device={name!r} is not a device; use auto, cpu, cuda or cuda:N", key="train.device"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RecipeError(
            f"train.device={name!r}, but torch sees no CUDA device; use auto or cpu", key="train.device.cuda"
        )
    if device.type == "cuda" and device.index is None:
        if local_rank >= torch.cuda.device_count():
            raise RecipeError(
                f"worker {local_rank} of this machine has no GPU of its own: there are {torch.cuda.device_count()}; "
                "set cluster.workers to at most that many, or train.device=cpu",
                key="cluster.workers",
            )
        device = torch.device("cuda", local_rank)
    return device


def prepare(context: Context, recipe: Recipe) -> torch.device:
    """Set threads, matmul precision and device of this process, join the process group, return the device."""
    torch.set_num_threads(threads(recipe, context.workers))
    torch.set_float32_matmul_precision(recipe.train.matmul)
    device = pick_device(recipe.train.device, context.local_rank)
    if device.type != "cpu":
        # fully_shard, Triton and synchronize() use the process's current device.
        torch.accelerator.set_device_index(device)
    join(context.rank, context.workers, context.init_method, context.timeout, device=device.type)
    return device


def threads(recipe: Recipe, workers: int) -> int:
    """Return the CPU threads of one worker: ``train.threads``, or an equal share of the cores."""
    return min(recipe.train.threads or core_share(workers), cores())


def shard_model(
    context: Context, recipe: Recipe, config: DecoderConfig, *, converters: Sequence[str | Converter] = ()
) -> ShardedModel:
    """Return this rank's shard of a decoder, converted by ``models.converters``, in the role's layout.

    RecipeError: ``train.parity`` of a model whose products have no bits of their own on this machine.
    """
    layout, device = ROLES[context.role].placed_by(recipe).layout, prepare(context, recipe)
    if recipe.train.offload and device.type == "cpu":
        message = f"train.offload = {recipe.train.offload} moves activations to host memory, where this device, a CPU,"
        raise RecipeError(f"{message} has them; set it to 0", key="train.offload.device")

    if recipe.train.parity:
        check_parity(config, DTYPES[recipe.train.precision])

    def build() -> Decoder:
        model = Decoder(config, dtype=DTYPES[recipe.train.precision])
        model.checkpointing = recipe.train.checkpointing
        return model

    dims = ParallelDims.of(context.mesh, context.rank, context.generation)
    how: dict[str, Any] = {"sp": layout.sp, "zero": layout.zero, "cp_style": layout.cp_style}
    how |= {"schedule": layout.pp_schedule, "converters": converters, "device": str(device)}
    if context.role == "policy":
        how["reducer"] = reducer_of(recipe.policy.comm, recipe.seed)
    return shard(build, dims, **how)


def _temperature(recipe: Recipe) -> float:
    """Return the temperature of log-probs: that of sampling, or 1 for given answers."""
    return recipe.rollout.temperature or 1.0 if recipe.flow_spec.samples else 1.0


def train_engine(recipe: Recipe, sharded: ShardedModel, section: OptimizerConfig, **more: Any) -> TrainEngine:
    """Return the train engine of a model with the settings of [train]; section: its optimizer."""
    t = recipe.train
    return TrainEngine(
        sharded,
        section,
        total_steps=recipe.algorithm.steps,
        micro_tokens=1 if recipe.data.packing == "none" else t.micro_tokens,  # a longer row is alone
        parity=t.parity,
        compile=t.compile is True,  # "auto" is decided where a run begins
        on_nan=recipe.guard.on_nan,
        seed=recipe.seed,
        experts=ExpertOptions(t.router_balance, t.router_z, t.router_correction, t.routing == "replay"),
        offload=offload_limits(recipe, sharded) if t.offload == "auto" else t.offload,
        **more,
    )


def offload_limits(recipe: Recipe, sharded: ShardedModel) -> OffloadLimits:
    """Return what decides which share of a long sequence's activations moves to the host: predicted sizes and times of
    a layer, a measured link, and the rank's part of the host memory that is available."""
    t, grid, device = recipe.train, sharded.grid, sharded.device
    shape, layers = tp_part(sharded.model.config, grid.size("tp")), sum(len(p.model.layers) for p in sharded.parts)
    micro = LargestMicroBatch(t.micro_tokens, t.micro_tokens, t.micro_tokens, False, 1.0)
    size = layer_bytes(recipe, ShardFactors(0, 0, shape, 0, sharded.spread), t.micro_tokens, micro) / t.micro_tokens
    host = HOST_PART * psutil.virtual_memory().available / max(1, torch.cuda.device_count())
    rates = HostRates(host_bandwidth(device), host, measured_flops(device, DTYPES[t.precision]))
    return OffloadLimits(layers, size, partial(layer_flops, shape), rates)
