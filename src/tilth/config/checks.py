"""Checks of recipe keys against each other, as far as neither the model nor the data is needed."""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from pydantic import BaseModel, TypeAdapter, ValidationError

from tilth.config.axes import AXES, DATA, ENGINE_AXES, MODEL, over
from tilth.config.code import keyword_options
from tilth.config.errors import AxisError, RecipeError, TilthError, nearest
from tilth.config.flows import FLOWS, OPTIONAL
from tilth.config.open_sets import COMPRESSORS, LOCAL_METHODS, algorithm_names
from tilth.config.plugins import SERVED, declared, shipped_tasks, task_names
from tilth.config.roles import ROLES, SHIPPED_ROLES, RoleSpec, resolve, roles_of
from tilth.config.schema import AlgorithmConfig, CommConfig, LayoutConfig, MixtureSource, Recipe, RewardConfig
from tilth.config.tasks import task_of

KV_BLOCK = 16
"""Tokens in one block of the rollout engine's KV cache."""
MOST_PROFILED = 100
"""Maximum steps in one profile: the profiler keeps every operation in memory until the last step."""

MOST_SHOWN = 80
"""Maximum characters of a value in an error."""

Refusals = Iterator[tuple[str, str] | RecipeError | AxisError]
"""(key, why its value is refused) of a recipe, or an error whose sentence does not begin with KEY = VALUE.

A key ends in a word of its own where one value has several reasons: ``train.parity.device``.
"""


def check(recipe: Recipe) -> None:
    """Raise ``RecipeError`` for the first contradiction between two keys."""
    keys = (_shape, _lengths, _engine, _parity, _learning, _adapters, _other_models, _names, _algorithm, _places)
    refuse(recipe, *keys, _mixture, _tasks, _episodes, _staleness, _elastic)
    check_cluster(recipe)


def check_cluster(recipe: Recipe) -> None:
    """Raise ``RecipeError`` if workers, pools and layouts contradict each other or other keys."""
    refuse(
        recipe, _roles, _workers, _pools, _search, _fill, _divided, _comm, _local, _limits, _rollback, _spares, _profile
    )


def refuse(recipe: Recipe, *rules: Callable[[Recipe], Refusals]) -> None:
    """Raise the error of the first refusal of these rules, if there is one."""
    for refusal in (refusal for rule in rules for refusal in rule(recipe)):
        raise refusal if isinstance(refusal, TilthError) else _refused(recipe, *refusal)


def _refused(recipe: Recipe, key: str, why: str) -> RecipeError:
    """Return the error of a key: KEY = VALUE, and why not. The key is read as far as it is one."""
    name, value = "", cast(Any, recipe)
    for part in key.split("."):
        inside = value if isinstance(value, Mapping) else dict(value) if isinstance(value, BaseModel) else {}
        if part not in inside:
            break
        name, value = f"{name}.{part}".lstrip("."), inside[part]
    listed = list(value) if isinstance(value, tuple) else value
    shown = (
        str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else f"{listed!r}"
    )
    short = shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]} ..."
    return RecipeError(f"{name} = {short}{'' if why[0] in ':,' else ' '}{why}", key=key)


def _shape(recipe: Recipe) -> Refusals:
    m = recipe.model
    if m.optimizer and not m.path:
        yield "model.optimizer", "needs a run in model.path, whose optimizer state it loads"
    if m.path:
        return
    if not m.head_dim and m.hidden % m.heads:
        yield "model.hidden", f"is not a multiple of model.heads = {m.heads}; or set model.head_dim"
    width = m.head_dim or m.hidden // m.heads
    if width < 2 or width % 2:
        message = f"a head is {width} wide (model.head_dim, or hidden / heads); rotary embedding needs an even width"
        yield RecipeError(message, key="model.head_dim")
    if m.kv_heads and m.heads % m.kv_heads:
        yield "model.kv_heads", f"does not divide model.heads = {m.heads}"


def _lengths(recipe: Recipe) -> Refusals:
    context, r = recipe.model.context, recipe.rollout
    if recipe.flow_spec.learns == "documents":  # generates nothing
        return
    scored = recipe.reward.function or recipe.reward.model or r.environment or recipe.data.source in task_names()
    if not recipe.flow_spec.samples and not scored:
        return
    if r.max_tokens >= context:
        yield "rollout.max_tokens", f"leaves no room for a prompt in model.context = {context}"
    least = -(-context // KV_BLOCK) * KV_BLOCK
    if r.kv_tokens and r.kv_tokens < least:
        why = f"does not hold one sequence of model.context = {context}; at least {least}, or 0: automatic"
        yield "rollout.kv_tokens", why


def _episodes(recipe: Recipe) -> Refusals:
    """Check what episodes of several turns cannot do."""
    r = recipe.rollout
    if r.serve and not r.environment:
        yield "rollout.serve", "serves the calls of an agent; name a tilth.Agent in rollout.environment"
    if not r.environment:
        return
    if recipe.reward.function:
        yield "reward.function", f"has no use: the environment {r.environment} gives the reward; leave it out"
    for axis in over("parameters", "experts"):
        if getattr(r.layout, axis) > 1:
            why = ": ranks of one engine would hear an environment at different times; use 1"
            yield f"rollout.layout.{axis}", why


def _staleness(recipe: Recipe) -> Refusals:
    """Check what does not go with samples of earlier versions of the policy, and keys that are for them alone."""
    r, used = recipe.rollout, f"beside rollout.staleness = {recipe.rollout.staleness}"
    behind = r.staleness != 0
    keys = "order", "inflight", "repack", "whole_every"
    for key, on in (("buffer", r.staleness == "free"), *((key, behind) for key in keys)):
        if not on and getattr(r, key) != type(r).model_fields[key].default:
            right = "free" if key == "buffer" else "1 or more"
            yield f"rollout.{key}.unused", f"has no use with rollout.staleness = {r.staleness}, but with {right}"
    if not r.staleness:
        return
    if not recipe.flow_spec.samples:
        yield "rollout.staleness.flow", f"has no use in flow = {recipe.flow}, which learns from given data; set it to 0"
    if r.partial:
        yield "rollout.partial.staleness", f"{used}: there, every sample goes on in later steps; use 0"
    if r.inflight == "finish" and r.engine != "native":
        yield "rollout.inflight.relay", f"{used} needs engines that take weights from a relay: rollout.engine = native"
    if recipe.train.routing == "replay":
        yield "train.routing.staleness", f"{used} needs the experts of earlier versions; use own"
    pool = pool_of(recipe, "rollout")
    if recipe.cluster.backend != "inline" and pool == pool_of(recipe, "policy"):
        why = (
            f"{used}: the policy is on these workers too, so that nothing can overlap; use pools, as in "
            "cluster.pools={train = 1, rollout = 1} and rollout.pool=rollout, or staleness = 0"
        )
        yield "rollout.pool.staleness", why
    if r.repack and r.environment:
        yield "rollout.repack.environment", "moves single answers, and an episode stays with its environment; use false"
    if r.repack and r.layout.sizes(pools(recipe)[pool])["dp"] == 1:
        why = "moves samples between replicas, and there is one; use false, or rollout.layout.dp=2 and workers for it"
        yield "rollout.repack.replicas", why


def _engine(recipe: Recipe) -> Refusals:
    """Check what only some generation engines have."""
    r, served = recipe.rollout, recipe.rollout.engine in SERVED
    if r.python and not served:
        why = f"is for engines of another environment ({', '.join(SERVED)}); rollout.engine is {r.engine}"
        yield "rollout.python.engine", why
    if r.options and r.engine == "native":
        yield "rollout.options", ": the native engine takes its options as keys of rollout"
    filters = [name for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)) if getattr(r, name) != off]
    if r.engine == "sglang" and filters:
        why = ": rollout.engine = sglang returns no log-probs after filters; leave it out, or use vllm"
        yield f"rollout.{filters[0]}.engine", why
    if served and r.tool_schemas:
        yield "rollout.tool_schemas.engine", f": rollout.engine = {r.engine} draws no calls by a schema; use native"
    if r.speculate != "off" and r.engine != "native":
        yield "rollout.speculate.engine", f": rollout.engine = {r.engine} takes no drafts of Tilth; use native, or off"
    yield from _drafts(recipe)
    if served and recipe.train.parity:
        yield "train.parity.engine", f": rollout.engine = {r.engine} rounds in its own kernels; use native"


def _drafts(recipe: Recipe) -> Refusals:
    """Check what drafts need, and keys that are for them alone."""
    r = recipe.rollout
    if r.speculate == "off" and r.draft != type(r.draft)():
        yield "rollout.draft.unused", "has no use with rollout.speculate = off; leave it out, or use suffix"
    if r.speculate != "off" and (recipe.flow_spec.learns == "documents" or recipe.flow_spec.value):
        yield "rollout.speculate.unused", f"has no use in flow = {recipe.flow}, which generates nothing; set it to off"
    if r.draft.path and r.speculate not in ("off", "model"):
        why = f"has no use with rollout.speculate = {r.speculate}; leave it out, or use model"
        yield "rollout.draft.path.unused", why
    if r.speculate == "model":
        if not r.draft.path:
            yield "rollout.draft.path", "is empty, and rollout.speculate = model drafts by the model in it"
        if r.draft.depth != type(r.draft)().depth:
            yield "rollout.draft.depth.unused", "has no use with rollout.speculate = model; leave it out"
    if r.run_ahead:
        yield from _run_ahead(recipe)
    if r.speculate != "off" and r.compile:
        why = "beside rollout.speculate: passes with drafts are not compiled, and their price knows no other; use one"
        yield "rollout.compile.speculate", why


def _run_ahead(recipe: Recipe) -> Refusals:
    r = recipe.rollout
    if r.speculate == "off":
        yield "rollout.run_ahead.unused", "has no use with rollout.speculate = off; use false, or suffix"
    if r.speculate == "model":
        yield (
            "rollout.run_ahead.model",
            "has no use with rollout.speculate = model: a model learns nothing of it; use false",
        )
    if r.staleness:
        why = f"beside rollout.staleness = {r.staleness}: there, engines begin the samples of later steps; use false"
        yield "rollout.run_ahead.staleness", why
    if r.environment:
        yield "rollout.run_ahead.environment", f"answers prompts, and {r.environment} begins episodes; use false"
    if recipe.data.loaders:
        yield "rollout.run_ahead.loaders", "takes prompts before their step, which data.loaders hand out once; use one"


def _parity(recipe: Recipe) -> Refusals:
    t = recipe.train
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", t.device):
        yield "train.device", "is not auto, cpu, cuda or cuda:N"
    if t.offload and t.device == "cpu":
        yield "train.offload.device", "moves activations to host memory, where train.device = cpu has them; set it to 0"
    if recipe.cluster.costs and t.balance == "none":
        yield "cluster.costs", "has costs that train.balance = none leaves out; leave one of them out"
    for role, layout in learners(recipe).items() if t.offload == "auto" else ():
        if layout.hdp > 1 and layout.pp != recipe.policy.layout.pp:
            here, there = f"{ROLES[role].key}.layout.pp = {layout.pp}", f"policy.layout.pp = {recipe.policy.layout.pp}"
            why = f"places rows by the layers of the policy's ranks, {there}, and {here}; use one number, or a share"
            yield "train.offload.auto", why
    if t.offload and t.checkpointing:
        yield "train.offload", f"with train.checkpointing = {t.checkpointing}: choose one of them"
    if not t.parity:
        return
    if t.device.startswith("cuda"):
        yield "train.parity.device", f"holds on a CPU only; train.device is {t.device!r}"
    for name, on in (("train.compile", t.compile is True), ("rollout.compile", recipe.rollout.compile)):
        if on:
            yield name, f"contradicts train.parity = true, which needs eager kernels; set {name} = false"
    if recipe.balance == "cost":
        key = "cluster.costs" if recipe.cluster.costs else "train.balance"
        yield key, ": measured costs place rows, and with train.parity = true nothing may depend on times; use tokens"
    if t.matmul != "highest":
        yield "train.parity.matmul", f"needs products in fp32: train.matmul = highest, not {t.matmul}"


def _learning(recipe: Recipe) -> Refusals:
    """Check that there is something to train, and data to train and evaluate on."""
    a, d, w = recipe.algorithm, recipe.data, recipe.supervised
    supervised = bool(w.steps or w.epochs)
    if not recipe.flow_spec.samples and not supervised:
        yield "supervised.steps", f"and supervised.epochs = 0 in flow = {recipe.flow}: there is nothing to train"
    if not a.steps and not supervised:
        yield "algorithm.steps", "and supervised.steps = 0: there is nothing to train"
    if recipe.model.dropout and recipe.flow_spec.samples and not supervised:
        why = (
            f"has no use in flow = {recipe.flow} without supervised steps: policy gradients run without dropout, as "
            "rollouts do; set it to 0, or supervised.steps"
        )
        yield "model.dropout.unused", why
    if recipe.train.routing == "replay" and not recipe.flow_spec.samples:
        yield "train.routing.unused", f"has no use in flow = {recipe.flow}, which samples nothing; set it to own"
    if supervised and w.until < 1 and d.holdout == 0 and not d.heldout:
        yield "supervised.until", "needs held-out prompts; data.holdout is 0 and data.heldout empty"
    if d.holdout == 1 and not d.heldout:
        yield "data.holdout", "leaves no prompt to train on"


def _names(recipe: Recipe) -> Refusals:
    """Check names of algorithms before ``tilth.rl``, which builds them, and with it torch are imported."""
    a = recipe.algorithm
    for key, name, known in (
        ("algorithm.advantage", a.advantage, [*algorithm_names("advantages"), *declared("advantage")]),
        ("algorithm.loss", a.loss, [*algorithm_names("losses"), *declared("policy_loss")]),
        ("algorithm.aggregation", a.aggregation, ["", *algorithm_names("aggregations")]),
        ("algorithm.correction", a.correction, ["", *algorithm_names("corrections")]),
        ("preference.loss", recipe.preference.loss, algorithm_names("preferences")),
    ):
        if name not in known:
            yield key, f"is not known; {nearest(name, filter(None, known))}"


def _algorithm(recipe: Recipe) -> Refusals:
    a, r, samples = recipe.algorithm, recipe.rollout, recipe.flow_spec.samples
    rows = r.prompts * r.group
    if a.dual_clip and a.dual_clip < 1:
        yield "algorithm.dual_clip", "is neither 0 (none) nor at least 1"
    if samples and a.kl_target and not a.kl_coef:
        yield "algorithm.kl_target", "adapts algorithm.kl_coef, which is 0; give it an initial value"
    if samples and a.kl_target and 5 * a.kl_horizon <= rows:
        why = f"is no more than a fifth of the {rows} samples of a step, so that the weight could turn negative"
        yield "algorithm.kl_horizon", why
    if samples and a.entropy_target and a.entropy_coef < 0:
        yield "algorithm.entropy_coef", "is below 0, where algorithm.entropy_target adapts it"
    if a.clip_low > 1:
        yield "algorithm.clip_low", "is above 1: a ratio cannot fall below 0"
    if samples and a.steps:
        yield from _experience(recipe)
    if recipe.flow_spec.learns == "pairs":
        yield from _pairs(recipe)
    if a.minibatches > rows:
        yield "algorithm.minibatches", f"is more than rollout.prompts x group = {rows}"


def _adapters(recipe: Recipe) -> Refusals:
    if recipe.model.adapter and not recipe.model.path:
        yield "model.adapter", "changes a model: name its base in model.path"
    for key, lora in (("policy.lora", recipe.policy.lora), ("critic.lora", recipe.critic.lora)):
        if not lora.rank:
            continue
        if not recipe.model.path:
            yield f"{key}.rank", "adapts a trained model, and this one is new: name it in model.path"
        yield from _adapter_dropout(recipe, key, lora.dropout)
        if recipe.train.router_correction:
            yield "train.router_correction", f"changes weights, which {key} freezes; set it to 0"
    if recipe.rollout.adapters == "adapter" and not recipe.policy.lora.rank:
        yield "rollout.adapters", ", but the policy learns its weights (policy.lora.rank = 0): set it to merged"
    if recipe.policy.lora.rank and recipe.train.ema:
        yield "train.ema", "averages weights, which policy.lora freezes; set it to 0"
    if recipe.policy.lora.rank and recipe.model.optimizer:
        yield "model.optimizer", "loads the state of weights, which policy.lora freezes; set it to false"


def _adapter_dropout(recipe: Recipe, key: str, dropout: float) -> Refusals:
    """Check that dropout of adapters has a use, and nothing that it contradicts."""
    if not dropout:
        return
    supervised = bool(recipe.supervised.steps or recipe.supervised.epochs) and recipe.flow_spec.learns != "pairs"
    why = {
        "only supervised steps have dropout, and there are none": not supervised or key != "policy.lora",
        "train.parity compares weights with the adapters merged in, which have none": recipe.train.parity,
        "train.compile would compile every step anew": recipe.train.compile is True,
        "policy.layout.sp divides tokens between layers": recipe.policy.layout.sp,
    }
    for reason in (reason for reason, wrong in why.items() if wrong):
        yield f"{key}.dropout", f": {reason}; set it to 0"


def _other_models(recipe: Recipe) -> Refusals:
    """Check the paths of models beside the policy: given if the flow needs one, and only then."""
    reference, judge, reward = recipe.reference.path, recipe.judge.path, recipe.reward
    if reference and not recipe.refers:
        yield "reference.path.unused", "has no use: algorithm.kl_coef is 0"
    if reward.model_weight != RewardConfig.model_fields["model_weight"].default and not reward.model:
        yield "reward.model_weight.unused", "has no use: reward.model is empty"
    if recipe.flow == "distill" and not recipe.teachers:
        yield "reference.path", "is empty, and flow = distill learns from the model in it, or reference.teachers"
    yield from _teachers(recipe)
    if recipe.aligns:
        yield from _aligned(recipe)
    asks = recipe.flow_spec.judge or recipe.grades
    if asks and not judge:
        who = f"flow = {recipe.flow}" if recipe.flow_spec.judge else "judge.rubric"
        yield "judge.path", f"is empty, and {who} asks the model in it; recipe flaws-judge trains one"
    if recipe.judge.rubric and "{completion}" not in recipe.judge.rubric:
        yield "judge.rubric", "shows the judge no answer; write {completion} in it"
    if judge and not asks:
        yield "judge.path.unused", f"has no use in flow = {recipe.flow}; set judge.rubric, or flow = fapo"


def _teachers(recipe: Recipe) -> Refusals:
    """Check that each source has one teacher, and each teacher a source."""
    table, field, owners = recipe.reference.teachers, recipe.reference.field, dict[str, str]()
    known = [part.name for part in recipe.data.sources]
    if field and not table:
        yield "reference.field.unused", "has no use without reference.teachers"
    if table and not recipe.teaches:
        message = f"reference.teachers has no use in flow = {recipe.flow}; use flow = distill"
        yield RecipeError(message, key="reference.teachers.unused")
    if table and recipe.reference.path:
        yield "reference.path.teachers", "stands beside reference.teachers; make it one of them, or leave it out"
    for name, teacher in table.items():
        key = f"reference.teachers.{name}"
        if not re.fullmatch(r"\w[\w-]*", name):
            message = f"reference.teachers has {name!r}, which is no name of letters, digits, _ and -; rename it"
            yield RecipeError(message, key=f"{key}.name")
        if not teacher.path:
            yield f"{key}.path", "is empty; name a run or a Hugging Face directory"
        if not teacher.sources:
            yield f"{key}.sources", "is empty, so no prompt follows this teacher; name some, or leave it out"
        if teacher.align == "characters" and not recipe.aligns:
            yield f"{key}.align", "needs algorithm.options.align = characters"
        for source in teacher.sources:
            if source in owners:
                whose = "twice" if owners[source] == name else f"as teacher {owners[source]} does"
                yield f"{key}.sources.twice", f"names {source!r} {whose}; a prompt follows one teacher"
            if not field and source not in known:
                right = nearest(source, known) if recipe.data.mixture else "set data.mixture, or reference.field"
                yield f"{key}.sources.{source}", f": {source!r} is no source of the data; {right}"
            owners[source] = name
    if table and recipe.aligns and all(teacher.align == "tokens" for teacher in table.values()):
        message = "algorithm.options.align = characters, and each teacher of reference.teachers has align = tokens"
        yield RecipeError(f"{message}; leave it out, or set that of one to auto", key="algorithm.options.align.unused")
    if table and not field and (left := [name for name in known if name not in owners]):
        message = f"no teacher of reference.teachers has source {left[0]!r} in its sources; add it to those of one"
        yield RecipeError(message, key="reference.teachers.sources")


def _aligned(recipe: Recipe) -> Refusals:
    """Check that nothing needs tokens that a teacher with another tokenizer lacks."""
    a, why = recipe.algorithm, "with algorithm.options.align = characters"
    if a.kl_coef:
        yield "algorithm.kl_coef.align", f"{why} is a penalty at tokens that the teacher lacks; set it to 0"
    if a.options.get("horizon"):
        yield "algorithm.options.horizon.align", f"{why} would add a chunk once for each of its tokens; set it to 0"
    if recipe.rollout.environment:
        yield "rollout.environment.align", f"{why} has no translation of turns; use prompts with one answer"


def _experience(recipe: Recipe) -> Refusals:
    a, flow = recipe.algorithm, recipe.flow
    for key in sorted(OPTIONAL - recipe.flow_spec.reads):
        if getattr(a, key) != AlgorithmConfig.model_fields[key].default:
            flows = ", ".join(name for name, other in FLOWS.items() if other.samples and key in other.reads)
            yield f"algorithm.{key}.unused", f"has no use in flow = {flow}; it is of {flows}"
    grouped = flow == "rloo" or bool(recipe.flow_spec.reads & {"drop_flat"} and (a.drop_flat or a.refill))
    if recipe.rollout.temperature == 0:
        yield "rollout.temperature", f"samples the same completion each time; flow {flow} needs it above 0"
    if recipe.rollout.group == 1 and grouped:
        why = "has nothing to compare a sample with" if flow == "rloo" else "with drop_flat or refill keeps no group"
        yield "rollout.group", f"in flow = {flow} {why}; use a group of 2 or more"


def _pairs(recipe: Recipe) -> Refusals:
    if recipe.reward.model:
        yield "reward.model", f"is for flows that learn from experience; flow = {recipe.flow} learns from pairs"
    if recipe.model.dropout:
        yield "model.dropout", f": flow = {recipe.flow} compares whole answers; set it to 0"
    if recipe.flow == "reward_model" and recipe.preference.sft:
        yield "preference.sft", ": a reward model has no likelihood; it is for flow = dpo"


def _places(recipe: Recipe) -> Refusals:
    name, where = recipe.run.name, recipe.run.checkpoints
    if "/" in name or name in (".", ".."):
        yield "run.name", "is a path; give the name of a folder in run.dir"
    if "@" in name:
        right = name.replace("@", "-")
        yield "run.name.checkpoint", f"has an @, as in RUN@best, which names a checkpoint; leave it out, as in {right}"
    if found := re.match(r"([A-Za-z][\w+.-]+):/(?!/)", where):
        right = f"{found[1]}://{where[found.end() :]}"
        yield "run.checkpoints", f"is no URL; write {right}, or ./{where} for a folder of that name"
    if not recipe.run.dir:
        yield "run.dir", "is empty; give a folder, such as runs"


# ---- workers, pools and layouts ----


def pools(recipe: Recipe) -> dict[str, int]:
    """Return name -> workers of each pool, the default pool first; without ``cluster.pools`` one pool named ""."""
    return dict(recipe.cluster.pools) or {"": recipe.cluster.workers}


def pool_of(recipe: Recipe, role: str) -> str:
    """Return the name of a role's pool."""
    return str(ROLES[role].placed_by(recipe).pool) or next(iter(pools(recipe)))


def learners(recipe: Recipe) -> dict[str, LayoutConfig]:
    """Return role -> layout of the roles of this recipe whose model is divided by a layout."""
    found = {name: spec for name, spec in roles_of(recipe).items() if spec.mesh == "layout"}
    return {name: spec.placed_by(recipe).layout for name, spec in found.items()}


def _roles(recipe: Recipe) -> Refusals:
    """Check that plugins declare the roles that the flow calls, and that every key of [roles] has a use."""
    wanted, brought = recipe.flow_spec.roles, [name for name in ROLES if name not in SHIPPED_ROLES]
    for name in sorted(wanted - ROLES.keys()):
        yield "flow.roles", f"calls role {name!r}, which no plugin declares; {nearest(name, brought)}"
    for name, section in recipe.roles.items():
        if name not in wanted or name in SHIPPED_ROLES:
            near = nearest(name, sorted(wanted - SHIPPED_ROLES))
            yield RecipeError(f"roles.{name} has no use in flow = {recipe.flow}; {near}", key=f"roles.{name}.unused")
        elif ROLES[name].mesh == "one" and section.layout != LayoutConfig():
            yield f"roles.{name}.layout.unused", f"has no use: {name} is one worker; leave it out"
        elif section.path and not ROLES[name].loads:
            yield f"roles.{name}.path.unused", f"has no use: {name} loads no model; leave it out"
        else:
            yield from _options(ROLES[name].key, name, keyword_options(resolve(ROLES[name].worker)), section.options)


def _mixture(recipe: Recipe) -> Refusals:
    """Check the sources of a mixture, who loads them, and packing, which decides what a sample is."""
    data, names = recipe.data, [part.name for part in recipe.data.mixture]
    if data.packing == "concat" and recipe.flow_spec.learns != "documents":
        yield "data.packing", f"cuts documents, and flow = {recipe.flow} learns from whole samples; use fit or none"
    for role, layout in learners(recipe).items() if data.packing == "none" else ():
        if layout.hdp > 1:
            how = f"{ROLES[role].key}.layout.hdp = {layout.hdp}"
            yield "data.packing", f"leaves samples alone, and {how} packs them; use fit"
    if data.packing == "none" and recipe.train.offload == "auto":
        yield "data.packing", "leaves no room that train.offload = auto compares a sample with; use fit, or a share"
    if data.loaders and recipe.flow_spec.learns == "documents":
        yield "data.loaders", f"has no use: flow = {recipe.flow} reads pieces that are tokenised already; set it to 0"
    if data.shadows and not data.loaders:
        yield "data.shadows", "has no loader to take over from; set data.loaders, or this to 0"
    if data.mixture and data.source:
        yield "data.source", "beside data.mixture: a source stands in one of them; leave it out, or set it to ''"
    for number, part in enumerate(data.mixture):
        for key, why in _mixed(recipe, part):
            named = f"data.mixture.{number}.{key}"
            yield RecipeError(f"{named} = {getattr(part, key)!r} {why}", key=named)
        if part.name in names[:number]:
            message = f"data.mixture has two sources of the name {part.name!r}; rename one"
            yield RecipeError(message, key=f"data.mixture.{number}.name.twice")
    if data.mixture and not any(part.weight * part.schedule.get("0", 1.0) for part in data.mixture):
        message = f"the weights of data.mixture ({', '.join(names)}) sum to 0 at the start; give one more than 0"
        yield RecipeError(message, key="data.mixture.weight")
    if not math.isfinite(sum(part.weight * max(part.schedule.values(), default=1.0) for part in data.mixture)):
        message = f"the weights of data.mixture ({', '.join(names)}) sum to more than a float; divide all"
        yield RecipeError(message, key="data.mixture.weight.large")


def _mixed(recipe: Recipe, part: MixtureSource) -> Iterator[tuple[str, str]]:
    """Yield (key, why it is refused) of one source of a mixture."""
    if not re.fullmatch(r"\w[\w.-]*", part.name):
        yield "name", "is no name of letters, digits, _, . and -"
    if not part.source:
        yield "source", "names neither a task nor files"
    if part.schedule and "0" not in part.schedule:
        yield "schedule", "has no weight for the first step; let it begin with 0, as in {0 = 1.0}"
    if part.template and recipe.rollout.environment:
        yield "template", "is for single answers; episodes of rollout.environment take data.template"
    if part.source in shipped_tasks():
        for key in ("columns", "filter", "transform"):
            if getattr(part, key):
                yield key, f"changes records, and the task {part.source} computes its prompts; leave it out"


def _tasks(recipe: Recipe) -> Refusals:
    """Check that tasks of plugins ask for existing keys of [data], and that a task takes each of data.options."""
    sources = [part.source for part in recipe.data.sources]
    named = [name for name in dict.fromkeys((*sources, recipe.data.heldout)) if name in task_names()]
    kinds: dict[str, Any] = {}
    for name in named if recipe.data.options else filter(declared("task").__contains__, named):
        prompts = task_of(name).prompts
        kinds |= (own := keyword_options(prompts))
        for key in inspect.signature(prompts).parameters.keys() - own.keys() - type(recipe.data).model_fields.keys():
            message = f"task {name!r}: its prompts ask for {key!r}, no key of [data]; an option stands after *"
            yield RecipeError(message, key=f"task.{name}.{key}")
    yield from _options("data", " and ".join(named) or "a source of files", kinds, recipe.data.options)


def _options(section: str, owner: str, kinds: Mapping[str, Any], options: Mapping[str, object]) -> Refusals:
    for name, value in options.items():
        key = f"{section}.options.{name}"
        if name not in kinds:
            yield RecipeError(f"{key}: {owner} has no such option; {nearest(name, kinds)}", key=key)
        elif kinds[name] is not inspect.Parameter.empty:
            try:
                TypeAdapter(kinds[name]).validate_python(value, strict=True)
            except ValidationError as error:
                yield RecipeError(f"{key} = {value!r}: {error.errors()[0]['msg']}", key=f"{key}.type")


def _workers(recipe: Recipe) -> Refusals:
    c, total, device = recipe.cluster, sum(pools(recipe).values()), recipe.train.device
    if c.pools and c.workers not in (1, total):
        yield "cluster.workers", f", but cluster.pools have {total} together; leave cluster.workers out"
    if "" in c.pools:
        yield "cluster.pools", "has a pool without a name; name it, as in cluster.pools.train=2"
    if c.backend == "inline" and total > 1:
        name = "cluster.pools" if c.pools else "cluster.workers"
        message = f"{name} = {total} workers, and cluster.backend = inline is one process; set it to local or ray"
        yield RecipeError(message, key="cluster.backend")
    if c.backend == "local" and total > 1 and ":" in device:
        yield "train.device.workers", f"is one GPU for {total} workers; use cuda: each takes its own"


def _pools(recipe: Recipe) -> Refusals:
    known = list(recipe.cluster.pools)
    for spec in ROLES.values():
        key, wanted = f"{spec.key}.pool", spec.placed_by(recipe).pool
        if not wanted or wanted in known or spec.section:
            continue
        right = nearest(wanted, known) if known else f"set cluster.pools.{wanted} = WORKERS, or leave {key} out"
        yield key, f"is not in cluster.pools; {right}"


def _limits(recipe: Recipe) -> Refusals:
    c, r = recipe.cluster, recipe.reward
    if c.backend != "inline" and recipe.flow_spec.learns != "documents" and c.timeout < 2 * r.timeout:
        why = (
            f"seconds for a call leave no room for a reward of reward.timeout = {r.timeout:g} s; set cluster.timeout "
            f"to {2 * r.timeout:g} or more, or a smaller reward.timeout"
        )
        yield "cluster.timeout", why


def _elastic(recipe: Recipe) -> Refusals:
    """Check the schedule of batches that change with the number of workers."""
    o, w = recipe.optimizer, recipe.supervised
    if recipe.guard.batch == "scale" and recipe.flow_spec.samples:
        yield "guard.batch", f"scales given data, and flow = {recipe.flow} samples its own; use guard.batch = 'keep'"
    if o.ramp_steps and recipe.guard.batch == "keep":
        yield "optimizer.ramp_steps", "is for batches that change: set guard.batch = 'scale', or it to 0"
    if o.plateau_steps and o.schedule != "plateau":
        yield (
            "optimizer.plateau_steps",
            f"is not for optimizer.schedule = '{o.schedule}'; use 'plateau', or set it to 0",
        )
    steps = recipe.algorithm.steps * recipe.algorithm.epochs * recipe.algorithm.minibatches
    steps = steps if recipe.flow_spec.samples else w.steps
    if o.schedule == "plateau" and 0 < steps < o.warmup_steps + o.plateau_steps:
        why = f"and optimizer.warmup_steps = {o.warmup_steps} are more than the {steps} optimizer steps of the run"
        yield "optimizer.plateau_steps", f"{why}; use at most {max(0, steps - o.warmup_steps)}"


def _rollback(recipe: Recipe) -> Refusals:
    g, backend = recipe.guard, recipe.cluster.backend
    if g.on_nan == "rollback" and (backend == "inline" or not g.restarts):
        why = f"cluster.backend = {backend!r} has none" if g.restarts else "guard.restarts = 0 allows none"
        yield "guard.on_nan", f"is a recovery, and {why}; use guard.on_nan = 'skip' or 'stop'"


def _spares(recipe: Recipe) -> Refusals:
    g, backend = recipe.guard, recipe.cluster.backend
    if g.spares and (backend != "ray" or not g.restarts):
        why = "guard.restarts = 0 uses none" if backend == "ray" else f"cluster.backend = {backend!r} has none"
        way = "guard.spares=0" if backend == "ray" else "guard.spares=0 or cluster.backend=ray"
        yield "guard.spares", f": {why}; use {way}"


def _profile(recipe: Recipe) -> Refusals:
    r = recipe.run
    if r.profile and not 0 < len(profiled(recipe)) <= MOST_PROFILED:
        right = f"A:B with 1 <= A < B <= A + {MOST_PROFILED}, as in 10:12 for steps 10 and 11"
        yield "run.profile", f"is not {right}"
    for problem in unknown_ranks(recipe, r.profile_ranks) if r.profile else ():
        yield RecipeError(f"run.profile_ranks: {problem}", key="run.profile_ranks")


def profiled(recipe: Recipe) -> range:
    """Return the steps of ``run.profile``; an empty range if the key is empty or not of the form A:B."""
    found = re.fullmatch(r"([1-9]\d{0,17}):(\d{1,18})", recipe.run.profile)
    return range(int(found[1]), int(found[2])) if found else range(0)


def unknown_ranks(recipe: Recipe, ranks: Sequence[int]) -> Iterator[str]:
    """Yield a sentence for each rank that is no worker of the recipe, and one if no rank is given."""
    workers = sum(pools(recipe).values())
    right = f"the workers are ranks 0 to {workers - 1}" if workers > 1 else "the one worker is rank 0"
    if not ranks:
        yield f"no rank is named; {right}"
    for rank in ranks:
        if not 0 <= rank < workers:
            yield f"there is no rank {rank}; {right}"


def _search(recipe: Recipe) -> Refusals:
    if recipe.cluster.search and recipe.cluster.pools:
        yield "cluster.search.pools", "chooses the pools, and cluster.pools are set; leave out one of the two"


def _fill(recipe: Recipe) -> Refusals:
    if recipe.cluster.search:  # layouts that are set are of pools that the search sizes
        return
    for role, spec in roles_of(recipe).items():
        if spec.mesh == "one":
            continue
        pool = pool_of(recipe, role)
        workers = pools(recipe)[pool]
        where = f"the {workers} workers of pool {pool}" if pool else f"cluster.workers = {workers}"
        yield from _fill_pool(f"{spec.key}.layout", spec.placed_by(recipe).layout, workers, where)


def _fill_pool(name: str, layout: LayoutConfig, workers: int, where: str) -> Refusals:
    """Check that the axes of the layout with key ``name`` multiply to the workers of its pool."""
    sizes, rest, others = layout.sizes(workers), workers, ""
    for axis in reversed(AXES.values()):
        size, key = sizes[axis.name], f"{name}.{axis.name}"
        if why := axis.undivided(size):
            yield AxisError(f"{key} = {size}: {why}", key=key)
        if not axis.fills and rest % size:
            message = f"{key} = {size} does not divide {where}{others}; {axis.name} may be {_divisors(rest)}"
            yield RecipeError(message, key=key)
            return
        if not axis.fills and size > 1:
            rest, others = rest // size, f"{others or ' with'} {key} = {size}"
    total, (fills,) = math.prod(sizes.values()), (axis.name for axis in AXES.values() if axis.fills)
    data = {n: size for n, size in sizes.items() if {*DATA}.issuperset(AXES[n].splits) and size > 1}
    for both in (n for n in data if len(data) > 1 and len(AXES[n].splits) > 1):
        beside = next(n for n in data if n != both)
        why = f"divides rows and tokens in place of {beside}, and {name}.{beside} is {data[beside]}"
        yield f"{name}.{both}", f"{why}; set {name}.{both} = {math.prod(data.values())} and no other of these"
    if total != workers:
        verb = "does not fill" if total < workers else "is more than"
        product = f"{name} {' x '.join(sizes)} = {' x '.join(map(str, sizes.values()))} = {total}"
        yield RecipeError(f"{product} {verb} {where}; {fills} = {rest} would, or 0: automatic", key=name)


def _divisors(number: int) -> str:
    *most, last = [str(d) for d in range(1, number + 1) if number % d == 0]
    return f"{', '.join(most)} or {last}" if most else last


def _divided(recipe: Recipe) -> Refusals:
    """Check what is impossible where a model is divided over ranks."""
    for spec in roles_of(recipe).values():
        if spec.mesh in ("copies", "engines"):
            yield from _copied(spec, spec.placed_by(recipe).layout)
        if spec.mesh == "engines":
            layout = spec.placed_by(recipe).layout
            for axis in over("parameters", "experts"):
                yield from _divided_engine(recipe, spec.key, axis, getattr(layout, axis) if axis in ENGINE_AXES else 1)
    parity = recipe.train.parity
    for role, layout in learners(recipe).items():
        name = f"{ROLES[role].key}.layout"
        partial = any(getattr(layout, axis) > 1 for axis in over("tokens", *MODEL))
        if layout.sp and layout.tp == 1:
            yield f"{name}.sp", f"divides over {name}.tp, which is 1; set tp to 2 or more, or sp = false"
        yield from _stages(recipe, name, layout)
        if parity and layout.tp > 1:
            yield "train.parity.tp", f"needs {name}.tp = 1, not {layout.tp}: partial sums round differently"
        if layout.cp_style != "ring" and layout.hdp > 1:
            yield f"{name}.cp_style.hdp", f"divides heads over all ranks, {name}.hdp has rings of any number; use ring"
        if layout.cp_style != "ring" and layout.cp == 1:
            yield f"{name}.cp_style", f"needs {name}.cp of 2 or more, not 1; or leave it out"
        for axis in over("tokens"):
            if parity and (size := getattr(layout, axis)) > 1:
                why = f"needs {name}.{axis} = 1, not {size}: parts of a softmax round differently"
                yield f"train.parity.{axis}", why
        if "noise_scale" in recipe.train.watch and role == "policy" and partial:
            right = " and ".join(f"{axis} = 1" for axis in over("tokens", *MODEL))
            yield "train.watch", f": noise_scale needs whole gradients: {name}.{right}; or leave it out"


def _stages(recipe: Recipe, name: str, layout: LayoutConfig) -> Refusals:
    """Check what a pipeline does not do."""
    key, schedule = f"{name}.pp_schedule", layout.pp_schedule
    if layout.pp == 1 and schedule != LayoutConfig().pp_schedule:
        yield key, f"orders the stages of {name}.pp, which is 1; set pp to 2 or more, or leave it out"
    if schedule == "zero-bubble" and recipe.train.compile is True:
        why = "needs train.compile = false: it splits the backward pass; or use 1f1b or interleaved"
        yield f"{key}.compile", why


def _comm(recipe: Recipe) -> Refusals:
    """Check what compression of the policy's gradients cannot do, and keys that are for it alone."""
    c, layout, exact = recipe.policy.comm, recipe.policy.layout, recipe.policy.comm.gradients == "exact"
    name = "policy.comm.gradients" if not exact else "policy.comm.weights"
    keys = ["feedback", "two_way", "node_size"] + ["options"] * (c.local == "none")
    keys += ["smallest"] * (c.weights == "exact" and c.local != "cser")
    for key in keys if exact else ():
        if getattr(c, key) != getattr(CommConfig(), key):
            why = "has no use with policy.comm.gradients = exact; leave it out, or use a compressor"
            yield f"policy.comm.{key}.unused", why
    if exact and c.weights == "exact":
        return
    if c.options:  # else torch is not imported
        own = keyword_options(resolve(COMPRESSORS[c.gradients].made))
        yield from _options("policy.comm", f"compressor {c.gradients}", own, c.options)
    if recipe.policy.lora.rank:
        why = f"compresses what weights learn, which policy.lora.rank = {recipe.policy.lora.rank} freezes; use exact"
        yield f"{name}.lora", why
    if recipe.cluster.search:
        return
    sizes = layout.meshed(pools(recipe)[pool_of(recipe, "policy")])
    ranks, two_level = math.prod(sizes[axis] for axis in over(*DATA)), c.gradients == "sdp4bit"
    if c.node_size > 1 and not (two_level and ranks % c.node_size == 0):
        why = f"does not divide {ranks} data ranks" if two_level else f"has no use with {name} = {c.gradients}"
        yield "policy.comm.node_size", f"{why}; set it to 1" + (f" or {ranks}" if two_level else "")
    if ranks == 1:
        why = "compresses what data ranks send to each other, and there is one; use exact, or more workers"
        yield f"{name}.ranks", why
    sharded = [axis for axis in over("rows") if axis in over(*MODEL) and sizes[axis] > 1 and layout.zero != 1]
    if c.weights != "exact" and layout.zero != 1:
        why = f"sends changes of weights that all data ranks have; set policy.layout.zero to 1, not {layout.zero}"
        yield "policy.comm.weights.zero", why
    if sharded and layout.zero == 3:
        why = "would code the gradients of each micro-batch; set policy.layout.zero to 1 or 2"
        yield f"{name}.zero", f"with policy.layout.{sharded[0]} = {sizes[sharded[0]]} and zero = 3 {why}"
    if sharded and layout.pp_schedule == "zero-bubble":
        why = "compresses no gradients that policy.layout.pp_schedule = zero-bubble defers; use 1f1b or interleaved"
        yield f"{name}.pp_schedule", why
    if c.two_way and two_level:
        yield "policy.comm.two_way.levels", f"is of other compressors than {c.gradients}; use false"
    if c.two_way and (sharded or layout.zero == 1):
        why = "compresses sums on their way to copies (dp), and here each rank keeps its part of them; use false"
        yield "policy.comm.two_way.zero", why


def _local(recipe: Recipe) -> Refusals:
    """Check what local methods cannot do, and keys that are for them alone."""
    c, layout, name, rank = recipe.policy.comm, recipe.policy.layout, "policy.comm.local", recipe.policy.lora.rank
    if c.local == "none":
        if c.every > 1:
            yield "policy.comm.every.unused", f"is a period of {name}, which is none; set it to 1, or use average"
        return
    if c.options:  # else torch is not imported
        own = keyword_options(resolve(LOCAL_METHODS[c.local]))
        yield from _options("policy.comm", f"local method {c.local}", own, c.options)
    for key in ("gradients", "weights"):
        if getattr(c, key) != "exact":
            yield f"policy.comm.{key}.local", f"has no use with {name} = {c.local}, which sends models; use exact"
    if recipe.flow_spec.learns not in ("answers", "documents"):
        why = f"trains a model on each data rank, and flow = {recipe.flow} needs a common one in each step"
        yield f"{name}.flow", f"{why}; use none, or flow sft or pretrain"
    if rank:
        yield f"{name}.lora", f"averages what weights learn, which policy.lora.rank = {rank} freezes; use none"
    if recipe.train.ema:
        yield "train.ema.local", f"follows one model, and {name} = {c.local} has one on each data rank; set it to 0"
    if "noise_scale" in recipe.train.watch:
        yield (
            "train.watch.local",
            f": noise_scale needs summed gradients, and {name} = {c.local} sums none; leave it out",
        )
    if c.local == "adaalter" and recipe.optimizer.name != c.local:
        why = f"averages the sums of squares of optimizer.name = adaalter, not {recipe.optimizer.name}; or use average"
        yield f"{name}.optimizer", why
    if recipe.cluster.search:
        return
    sizes = layout.meshed(pools(recipe)[pool_of(recipe, "policy")])
    for axis in (axis for axis in over(*DATA) if axis != "dp" and sizes[axis] > 1):
        key = f"{name}.zero" if axis in over("rows") and axis in over(*MODEL) else f"{name}.{axis}"
        why = (
            f"needs a whole model on each data rank, and policy.layout.{axis} = {sizes[axis]} with zero = {layout.zero}"
        )
        yield key, f"{why} has parts of one; use dp in its place"
    if layout.zero == 1:
        yield (
            f"{name}.zero",
            "needs an optimizer for each data rank, and policy.layout.zero = 1 divides one; leave it out",
        )


def _copied(spec: RoleSpec, layout: LayoutConfig) -> Refusals:
    """Check that a layout divides rows alone, of engines also their model along tp."""
    takes = ENGINE_AXES if spec.mesh == "engines" else ("dp",)
    sizes = [(n, getattr(layout, n), "1") for n, axis in AXES.items() if n not in takes and axis.splits != ("rows",)]
    modes = [(n, getattr(layout, n), str(right).lower()) for n, right in LayoutConfig() if n not in AXES]
    for name, value, right in (*sizes, *modes):
        key, found = f"{spec.key}.layout.{name}", str(value).lower()
        if found != right:
            what = f"the {spec.name} engine" if spec.mesh == "engines" else spec.name
            yield f"{key}.copies", f", but {what} takes {_listed(takes)} only; set it to {right}"


def _listed(names: tuple[str, ...]) -> str:
    """Format names: "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _divided_engine(recipe: Recipe, role: str, axis: str, size: int) -> Refusals:
    """Check what an engine over several ranks does not have."""
    key, r = f"{role}.layout.{axis}", recipe.rollout
    if size == 1:
        return
    if r.engine != "native":
        yield f"{key}.engine", f", but rollout.engine = {r.engine} is not divided by Tilth; set {key} = 1"
    if role == "rollout" and r.compile:
        why = f"does not compile the collectives that {key} = {size} has in every step; set one to its default"
        yield f"rollout.compile.{axis}", why
    if role == "rollout" and r.draft.apart:
        why = f", but drafts of a process apart come by a clock, and the ranks of {key} = {size} guess alike; use false"
        yield f"rollout.draft.apart.{axis}", why
    if role == "rollout" and recipe.train.parity:
        yield f"train.parity.{axis}", f"needs {key} = 1, not {size}: partial sums round differently"
