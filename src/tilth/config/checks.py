"""Checks of recipe keys against each other, as far as neither the model nor the data is needed."""

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tilth.config.axes import AXES, ENGINE_AXES, MODEL, over
from tilth.config.code import keyword_options
from tilth.config.errors import AxisError, RecipeError, nearest
from tilth.config.flows import FLOWS, OPTIONAL
from tilth.config.open_sets import algorithm_names
from tilth.config.plugins import SERVED, declared, task_names
from tilth.config.roles import ROLES, SHIPPED_ROLES, RoleSpec, resolve, roles_of
from tilth.config.schema import AlgorithmConfig, LayoutConfig, Recipe, RewardConfig
from tilth.config.tasks import task_of

KV_BLOCK = 16
"""Tokens in one block of the rollout engine's KV cache."""
MOST_PROFILED = 100
"""Maximum steps in one profile: the profiler keeps every operation in memory until the last step."""

_Errors = Iterator[RecipeError | AxisError]


def check(recipe: Recipe) -> None:
    """Raise ``RecipeError`` for the first contradiction between two keys."""
    for rule in (
        _shape,
        _lengths,
        _engine,
        _parity,
        _learning,
        _adapters,
        _other_models,
        _names,
        _algorithm,
        _places,
        _tasks,
        _episodes,
    ):
        for error in rule(recipe):
            raise error
    check_cluster(recipe)


def check_cluster(recipe: Recipe) -> None:
    """Raise ``RecipeError`` if workers, pools and layouts contradict each other or other keys."""
    for rule in (_roles, _workers, _pools, _search, _fill, _divided, _limits, _rollback, _spares, _profile):
        for error in rule(recipe):
            raise error


def _shape(recipe: Recipe) -> _Errors:
    m = recipe.model
    if m.optimizer and not m.path:
        message = "model.optimizer = true needs a run in model.path, whose optimizer state it loads"
        yield RecipeError(message, key="model.optimizer")
    if m.path:
        return
    if not m.head_dim and m.hidden % m.heads:
        message = f"model.hidden = {m.hidden} is not a multiple of model.heads = {m.heads}; or set model.head_dim"
        yield RecipeError(message, key="model.hidden")
    width = m.head_dim or m.hidden // m.heads
    if width < 2 or width % 2:
        message = f"a head is {width} wide (model.head_dim, or hidden / heads); rotary embedding needs an even width"
        yield RecipeError(message, key="model.head_dim")
    if m.kv_heads and m.heads % m.kv_heads:
        message = f"model.kv_heads = {m.kv_heads} does not divide model.heads = {m.heads}"
        yield RecipeError(message, key="model.kv_heads")


def _lengths(recipe: Recipe) -> _Errors:
    context, r = recipe.model.context, recipe.rollout
    if recipe.flow_spec.learns == "documents":  # generates nothing
        return
    scored = recipe.reward.function or recipe.reward.model or r.environment or recipe.data.source in task_names()
    if not recipe.flow_spec.samples and not scored:
        return
    if r.max_tokens >= context:
        message = f"rollout.max_tokens = {r.max_tokens} leaves no room for a prompt in model.context = {context}"
        yield RecipeError(message, key="rollout.max_tokens")
    least = -(-context // KV_BLOCK) * KV_BLOCK
    if r.kv_tokens and r.kv_tokens < least:
        message = f"rollout.kv_tokens = {r.kv_tokens} does not hold one sequence of model.context = {context}; "
        yield RecipeError(f"{message}at least {least}, or 0: automatic", key="rollout.kv_tokens")


def _episodes(recipe: Recipe) -> _Errors:
    """Check what episodes of several turns cannot do."""
    r = recipe.rollout
    if r.serve and not r.environment:
        message = "rollout.serve = true serves the calls of an agent; name a tilth.Agent in rollout.environment"
        yield RecipeError(message, key="rollout.serve")
    if not r.environment:
        return
    if recipe.reward.function:
        message = f"the environment {r.environment} gives the reward; leave reward.function out"
        yield RecipeError(message, key="reward.function")
    for axis in over("parameters", "experts"):
        if (size := getattr(r.layout, axis)) > 1:
            message = (
                f"rollout.layout.{axis} = {size}: ranks of one engine would hear an environment at different times"
            )
            yield RecipeError(f"{message}; use 1", key=f"rollout.layout.{axis}")


def _engine(recipe: Recipe) -> _Errors:
    """Check what only some generation engines have."""
    r, served = recipe.rollout, recipe.rollout.engine in SERVED
    if r.python and not served:
        message = f"rollout.python = {r.python!r} is for engines of another environment ({', '.join(SERVED)})"
        yield RecipeError(f"{message}; rollout.engine is {r.engine}", key="rollout.python.engine")
    if r.options and r.engine == "native":
        message = f"rollout.options has {', '.join(r.options)}; the native engine takes its options as keys of rollout"
        yield RecipeError(message, key="rollout.options")
    filters = [name for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)) if getattr(r, name) != off]
    if r.engine == "sglang" and filters:
        message = (
            f"rollout.{filters[0]} = {getattr(r, filters[0])}: rollout.engine = sglang returns no log-probs after "
        )
        yield RecipeError(f"{message}filters; leave it out, or use vllm", key=f"rollout.{filters[0]}.engine")
    if served and r.tool_schemas:
        message = f"rollout.tool_schemas = true: rollout.engine = {r.engine} draws no calls by a schema; use native"
        yield RecipeError(message, key="rollout.tool_schemas.engine")
    if served and recipe.train.parity:
        message = f"train.parity = true: rollout.engine = {r.engine} rounds in its own kernels; use native"
        yield RecipeError(message, key="train.parity.engine")


def _parity(recipe: Recipe) -> _Errors:
    t = recipe.train
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", t.device):
        yield RecipeError(f"train.device = {t.device!r} is not auto, cpu, cuda or cuda:N", key="train.device")
    if t.offload_activations and t.device == "cpu":
        message = "train.offload_activations = true moves activations to host memory, where train.device = cpu has them"
        yield RecipeError(message, key="train.offload_activations.device")
    if t.offload_activations and t.checkpointing:
        message = f"train.offload_activations = true with train.checkpointing = {t.checkpointing}: choose one of them"
        yield RecipeError(message, key="train.offload_activations")
    if not t.parity:
        return
    if t.device.startswith("cuda"):
        message = f"train.parity = true holds on a CPU only; train.device is {t.device!r}"
        yield RecipeError(message, key="train.parity.device")
    for name, on in (("train.compile", t.compile), ("rollout.compile", recipe.rollout.compile)):
        if on:
            yield RecipeError(f"train.parity = true needs eager kernels; set {name} = false", key=name)
    if t.matmul != "highest":
        message = f"train.parity = true needs products in fp32: train.matmul = highest, not {t.matmul}"
        yield RecipeError(message, key="train.parity.matmul")


def _learning(recipe: Recipe) -> _Errors:
    """Check that there is something to train, and data to train and evaluate on."""
    a, d, w = recipe.algorithm, recipe.data, recipe.supervised
    supervised = bool(w.steps or w.epochs)
    if not recipe.flow_spec.samples and not supervised:
        message = f"nothing to train: flow = {recipe.flow}, and supervised.steps and supervised.epochs are both 0"
        yield RecipeError(message, key="supervised.steps")
    if not a.steps and not supervised:
        message = "nothing to train: algorithm.steps and supervised.steps are both 0"
        yield RecipeError(message, key="algorithm.steps")
    if recipe.model.dropout and recipe.flow_spec.samples and not supervised:
        message = (
            f"model.dropout = {recipe.model.dropout} has no use in flow = {recipe.flow} without supervised steps: "
            "policy gradients run without dropout, as rollouts do; set it to 0, or supervised.steps"
        )
        yield RecipeError(message, key="model.dropout.unused")
    if recipe.train.routing == "replay" and not recipe.flow_spec.samples:
        message = f"train.routing = replay has no use in flow = {recipe.flow}, which samples nothing to replay"
        yield RecipeError(f"{message}; set it to own", key="train.routing.unused")
    if supervised and w.until < 1 and d.holdout == 0 and not d.heldout:
        message = f"supervised.until = {w.until} needs held-out prompts; data.holdout is 0 and data.heldout empty"
        yield RecipeError(message, key="supervised.until")
    if d.holdout == 1 and not d.heldout:
        yield RecipeError("data.holdout = 1 leaves no prompt to train on", key="data.holdout")


def _names(recipe: Recipe) -> _Errors:
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
            yield RecipeError(f"{key} = {name!r} is not known; {nearest(name, filter(None, known))}", key=key)


def _algorithm(recipe: Recipe) -> _Errors:
    a, r, samples = recipe.algorithm, recipe.rollout, recipe.flow_spec.samples
    rows = r.prompts * r.group
    if a.dual_clip and a.dual_clip < 1:
        message = f"algorithm.dual_clip = {a.dual_clip} is neither 0 (none) nor at least 1"
        yield RecipeError(message, key="algorithm.dual_clip")
    if samples and a.kl_target and not a.kl_coef:
        message = f"algorithm.kl_target = {a.kl_target} adapts algorithm.kl_coef, which is 0; give it an initial value"
        yield RecipeError(message, key="algorithm.kl_target")
    if samples and a.kl_target and 5 * a.kl_horizon <= rows:
        message = (
            f"algorithm.kl_horizon = {a.kl_horizon} is no more than a fifth of the {rows} samples of a "
            "step, so that the weight could turn negative"
        )
        yield RecipeError(message, key="algorithm.kl_horizon")
    if samples and a.entropy_target and a.entropy_coef < 0:
        message = f"algorithm.entropy_coef = {a.entropy_coef} is below 0, where algorithm.entropy_target adapts it"
        yield RecipeError(message, key="algorithm.entropy_coef")
    if a.clip_low > 1:
        message = f"algorithm.clip_low = {a.clip_low} is above 1: a ratio cannot fall below 0"
        yield RecipeError(message, key="algorithm.clip_low")
    if samples and a.steps:
        yield from _experience(recipe)
    if recipe.flow_spec.learns == "pairs":
        yield from _pairs(recipe)
    if a.minibatches > rows:
        message = f"algorithm.minibatches = {a.minibatches} is more than rollout.prompts x group = {rows}"
        yield RecipeError(message, key="algorithm.minibatches")


def _adapters(recipe: Recipe) -> _Errors:
    if recipe.model.adapter and not recipe.model.path:
        message = f"model.adapter = {recipe.model.adapter} changes a model: name its base in model.path"
        yield RecipeError(message, key="model.adapter")
    for key, lora in (("policy.lora", recipe.policy.lora), ("critic.lora", recipe.critic.lora)):
        if not lora.rank:
            continue
        if not recipe.model.path:
            message = f"{key}.rank = {lora.rank} adapts a trained model, and this one is new: name it in model.path"
            yield RecipeError(message, key=f"{key}.rank")
        yield from _adapter_dropout(recipe, key, lora.dropout)
        if recipe.train.router_correction:
            message = f"train.router_correction = {recipe.train.router_correction} changes weights, which {key} freezes"
            yield RecipeError(f"{message}; set it to 0", key="train.router_correction")
    if recipe.rollout.adapters == "adapter" and not recipe.policy.lora.rank:
        message = (
            "rollout.adapters = adapter, but the policy learns its weights (policy.lora.rank = 0): set it to merged"
        )
        yield RecipeError(message, key="rollout.adapters")
    if recipe.policy.lora.rank and recipe.train.ema:
        message = f"train.ema = {recipe.train.ema} averages weights, which policy.lora freezes; set it to 0"
        yield RecipeError(message, key="train.ema")
    if recipe.policy.lora.rank and recipe.model.optimizer:
        message = "model.optimizer = true loads the state of weights, which policy.lora freezes; set it to false"
        yield RecipeError(message, key="model.optimizer")


def _adapter_dropout(recipe: Recipe, key: str, dropout: float) -> _Errors:
    """Check that dropout of adapters has a use, and nothing that it contradicts."""
    if not dropout:
        return
    supervised = bool(recipe.supervised.steps or recipe.supervised.epochs) and recipe.flow_spec.learns != "pairs"
    why = {
        "only supervised steps have dropout, and there are none": not supervised or key != "policy.lora",
        "train.parity compares weights with the adapters merged in, which have none": recipe.train.parity,
        "train.compile would compile every step anew": recipe.train.compile,
        "policy.layout.sp divides tokens between layers": recipe.policy.layout.sp,
    }
    for reason in (reason for reason, wrong in why.items() if wrong):
        yield RecipeError(f"{key}.dropout = {dropout}: {reason}; set it to 0", key=f"{key}.dropout")


def _other_models(recipe: Recipe) -> _Errors:
    """Check the paths of models beside the policy: given if the flow needs one, and only then."""
    reference, judge, reward = recipe.reference.path, recipe.judge.path, recipe.reward
    if reference and not recipe.refers:
        message = f"reference.path = {reference} has no use: algorithm.kl_coef is 0"
        yield RecipeError(message, key="reference.path.unused")
    if reward.model_weight != RewardConfig.model_fields["model_weight"].default and not reward.model:
        message = f"reward.model_weight = {reward.model_weight} has no use: reward.model is empty"
        yield RecipeError(message, key="reward.model_weight.unused")
    if recipe.flow == "distill" and not reference:
        message = "flow = distill learns from the model in reference.path, which is empty"
        yield RecipeError(message, key="reference.path")
    asks = recipe.flow_spec.judge or recipe.grades
    if asks and not judge:
        who = f"flow = {recipe.flow}" if recipe.flow_spec.judge else "judge.rubric"
        message = f"{who} asks the model in judge.path, which is empty; recipe flaws-judge trains one"
        yield RecipeError(message, key="judge.path")
    if recipe.judge.rubric and "{completion}" not in recipe.judge.rubric:
        message = f"judge.rubric = {recipe.judge.rubric[:60]!r} shows the judge no answer; write {{completion}} in it"
        yield RecipeError(message, key="judge.rubric")
    if judge and not asks:
        message = f"judge.path = {judge} has no use in flow = {recipe.flow}; set judge.rubric, or flow = fapo"
        yield RecipeError(message, key="judge.path.unused")


def _experience(recipe: Recipe) -> _Errors:
    a, flow = recipe.algorithm, recipe.flow
    for key in sorted(OPTIONAL - recipe.flow_spec.reads):
        if getattr(a, key) != AlgorithmConfig.model_fields[key].default:
            flows = ", ".join(name for name, other in FLOWS.items() if other.samples and key in other.reads)
            message = f"algorithm.{key} = {getattr(a, key)} has no use in flow = {flow}; it is of {flows}"
            yield RecipeError(message, key=f"algorithm.{key}.unused")
    grouped = flow == "rloo" or bool(recipe.flow_spec.reads & {"drop_flat"} and (a.drop_flat or a.refill))
    if recipe.rollout.temperature == 0:
        message = f"rollout.temperature = 0 samples the same completion each time; flow {flow} needs it above 0"
        yield RecipeError(message, key="rollout.temperature")
    if recipe.rollout.group == 1 and grouped:
        why = "has nothing to compare a sample with" if flow == "rloo" else "with drop_flat or refill keeps no group"
        message = f"rollout.group = 1 in flow = {flow} {why}; use a group of 2 or more"
        yield RecipeError(message, key="rollout.group")


def _pairs(recipe: Recipe) -> _Errors:
    if recipe.reward.model:
        message = f"reward.model is for flows that learn from experience; flow = {recipe.flow} learns from pairs"
        yield RecipeError(message, key="reward.model")
    if recipe.model.dropout:
        message = f"model.dropout = {recipe.model.dropout}: flow = {recipe.flow} compares whole answers; set it to 0"
        yield RecipeError(message, key="model.dropout")
    if recipe.flow == "reward_model" and recipe.preference.sft:
        message = f"preference.sft = {recipe.preference.sft}: a reward model has no likelihood; it is for flow = dpo"
        yield RecipeError(message, key="preference.sft")


def _places(recipe: Recipe) -> _Errors:
    name, where = recipe.run.name, recipe.run.checkpoints
    if "/" in name or name in (".", ".."):
        yield RecipeError(f"run.name = {name!r} is a path; give the name of a folder in run.dir", key="run.name")
    if "@" in name:
        right = name.replace("@", "-")
        message = f"run.name = {name!r} has an @, as in RUN@best, which names a checkpoint; leave it out, as in {right}"
        yield RecipeError(message, key="run.name.checkpoint")
    if found := re.match(r"([A-Za-z][\w+.-]+):/(?!/)", where):
        right = f"{found[1]}://{where[found.end() :]}"
        message = f"run.checkpoints = {where!r} is no URL; write {right}, or ./{where} for a folder of that name"
        yield RecipeError(message, key="run.checkpoints")
    if not recipe.run.dir:
        yield RecipeError("run.dir is empty; give a folder, such as runs", key="run.dir")


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


def _roles(recipe: Recipe) -> _Errors:
    """Check that plugins declare the roles that the flow calls, and that every key of [roles] has a use."""
    wanted, brought = recipe.flow_spec.roles, [name for name in ROLES if name not in SHIPPED_ROLES]
    for name in sorted(wanted - ROLES.keys()):
        message = f"flow = {recipe.flow} calls role {name!r}, which no plugin declares; {nearest(name, brought)}"
        yield RecipeError(message, key="flow.roles")
    for name, section in recipe.roles.items():
        if name not in wanted or name in SHIPPED_ROLES:
            near = nearest(name, sorted(wanted - SHIPPED_ROLES))
            message = f"roles.{name} has no use in flow = {recipe.flow}; {near}"
            yield RecipeError(message, key=f"roles.{name}.unused")
        elif ROLES[name].mesh == "one" and section.layout != LayoutConfig():
            message = f"roles.{name}.layout has no use: {name} is one worker; leave it out"
            yield RecipeError(message, key=f"roles.{name}.layout.unused")
        elif section.path and not ROLES[name].loads:
            message = f"roles.{name}.path = {section.path} has no use: {name} loads no model; leave it out"
            yield RecipeError(message, key=f"roles.{name}.path.unused")
        else:
            yield from _options(ROLES[name].key, name, keyword_options(resolve(ROLES[name].worker)), section.options)


def _tasks(recipe: Recipe) -> _Errors:
    """Check that tasks of plugins ask for existing keys of [data], and that a task takes each of data.options."""
    named = [name for name in (recipe.data.source, recipe.data.heldout) if name in task_names()]
    kinds: dict[str, Any] = {}
    for name in named if recipe.data.options else filter(declared("task").__contains__, named):
        prompts = task_of(name).prompts
        kinds |= (own := keyword_options(prompts))
        for key in inspect.signature(prompts).parameters.keys() - own.keys() - type(recipe.data).model_fields.keys():
            message = f"task {name!r}: its prompts ask for {key!r}, no key of [data]; an option stands after *"
            yield RecipeError(message, key=f"task.{name}.{key}")
    yield from _options("data", " and ".join(named) or "a source of files", kinds, recipe.data.options)


def _options(section: str, owner: str, kinds: Mapping[str, Any], options: Mapping[str, object]) -> _Errors:
    for name, value in options.items():
        key = f"{section}.options.{name}"
        if name not in kinds:
            yield RecipeError(f"{key}: {owner} has no such option; {nearest(name, kinds)}", key=key)
        elif kinds[name] is not inspect.Parameter.empty:
            try:
                TypeAdapter(kinds[name]).validate_python(value, strict=True)
            except ValidationError as error:
                yield RecipeError(f"{key} = {value!r}: {error.errors()[0]['msg']}", key=f"{key}.type")


def _workers(recipe: Recipe) -> _Errors:
    c, total, device = recipe.cluster, sum(pools(recipe).values()), recipe.train.device
    if c.pools and c.workers not in (1, total):
        message = f"cluster.workers = {c.workers}, but cluster.pools have {total} together; leave cluster.workers out"
        yield RecipeError(message, key="cluster.workers")
    if "" in c.pools:
        message = "cluster.pools has a pool without a name; name it, as in cluster.pools.train=2"
        yield RecipeError(message, key="cluster.pools")
    if c.backend == "inline" and total > 1:
        name = "cluster.pools" if c.pools else "cluster.workers"
        message = f"{name} = {total} workers, and cluster.backend = inline is one process; set it to local or ray"
        yield RecipeError(message, key="cluster.backend")
    if c.backend == "local" and total > 1 and ":" in device:
        message = f"train.device = {device!r} is one GPU for {total} workers; use cuda: each takes its own"
        yield RecipeError(message, key="train.device.workers")


def _pools(recipe: Recipe) -> _Errors:
    known = list(recipe.cluster.pools)
    for spec in ROLES.values():
        key, wanted = f"{spec.key}.pool", spec.placed_by(recipe).pool
        if not wanted or wanted in known or spec.section:
            continue
        right = nearest(wanted, known) if known else f"set cluster.pools.{wanted} = WORKERS, or leave {key} out"
        yield RecipeError(f"{key} = {wanted!r} is not in cluster.pools; {right}", key=key)


def _limits(recipe: Recipe) -> _Errors:
    c, r = recipe.cluster, recipe.reward
    if c.backend != "inline" and recipe.flow_spec.learns != "documents" and c.timeout < 2 * r.timeout:
        message = (
            f"cluster.timeout = {c.timeout:g} s for a call does not leave room for a reward of reward.timeout = "
            f"{r.timeout:g} s; set cluster.timeout to {2 * r.timeout:g} or more, or a smaller reward.timeout"
        )
        yield RecipeError(message, key="cluster.timeout")


def _rollback(recipe: Recipe) -> _Errors:
    g, backend = recipe.guard, recipe.cluster.backend
    if g.on_nan == "rollback" and (backend == "inline" or not g.restarts):
        why = f"cluster.backend = {backend!r} has none" if g.restarts else "guard.restarts = 0 allows none"
        message = f"guard.on_nan = 'rollback' is a recovery, and {why}"
        yield RecipeError(f"{message}; use guard.on_nan = 'skip' or 'stop'", key="guard.on_nan")


def _spares(recipe: Recipe) -> _Errors:
    g, backend = recipe.guard, recipe.cluster.backend
    if g.spares and (backend != "ray" or not g.restarts):
        why = "guard.restarts = 0 uses none" if backend == "ray" else f"cluster.backend = {backend!r} has none"
        way = "guard.spares=0" if backend == "ray" else "guard.spares=0 or cluster.backend=ray"
        yield RecipeError(f"guard.spares = {g.spares}: {why}; use {way}", key="guard.spares")


def _profile(recipe: Recipe) -> _Errors:
    r = recipe.run
    if r.profile and not 0 < len(profiled(recipe)) <= MOST_PROFILED:
        right = f"A:B with 1 <= A < B <= A + {MOST_PROFILED}, as in 10:12 for steps 10 and 11"
        yield RecipeError(f"run.profile = {r.profile!r} is not {right}", key="run.profile")
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


def _search(recipe: Recipe) -> _Errors:
    if recipe.cluster.search and recipe.cluster.pools:
        message = "cluster.pools are set, and cluster.search = true chooses them; leave out one of the two"
        yield RecipeError(message, key="cluster.search.pools")


def _fill(recipe: Recipe) -> _Errors:
    if recipe.cluster.search:  # layouts that are set are of pools that the search sizes
        return
    for role, spec in roles_of(recipe).items():
        if spec.mesh == "one":
            continue
        pool = pool_of(recipe, role)
        workers = pools(recipe)[pool]
        where = f"the {workers} workers of pool {pool}" if pool else f"cluster.workers = {workers}"
        yield from _fill_pool(f"{spec.key}.layout", spec.placed_by(recipe).layout, workers, where)


def _fill_pool(name: str, layout: LayoutConfig, workers: int, where: str) -> _Errors:
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
    if total != workers:
        verb = "does not fill" if total < workers else "is more than"
        product = f"{name} {' x '.join(sizes)} = {' x '.join(map(str, sizes.values()))} = {total}"
        yield RecipeError(f"{product} {verb} {where}; {fills} = {rest} would, or 0: automatic", key=name)


def _divisors(number: int) -> str:
    *most, last = [str(d) for d in range(1, number + 1) if number % d == 0]
    return f"{', '.join(most)} or {last}" if most else last


def _divided(recipe: Recipe) -> _Errors:
    """Check what is impossible where a model is divided over ranks."""
    for spec in roles_of(recipe).values():
        if spec.mesh in ("copies", "engines"):
            yield from _copied(spec, spec.placed_by(recipe).layout)
        if spec.mesh == "engines":
            layout = spec.placed_by(recipe).layout
            for axis in over("parameters", "experts"):
                yield from _divided_engine(recipe, spec.key, axis, getattr(layout, axis) if axis in ENGINE_AXES else 1)
    for role, layout in learners(recipe).items():
        name = f"{ROLES[role].key}.layout"
        partial = any(getattr(layout, axis) > 1 for axis in over("tokens", *MODEL))
        if layout.sp and layout.tp == 1:
            message = f"{name}.sp = true divides over {name}.tp, which is 1; set tp to 2 or more, or sp = false"
            yield RecipeError(message, key=f"{name}.sp")
        yield from _stages(recipe, name, layout)
        if recipe.train.parity and layout.tp > 1:
            message = f"train.parity = true needs {name}.tp = 1, not {layout.tp}: partial sums round differently"
            yield RecipeError(message, key="train.parity.tp")
        if layout.cp_style != "ring" and layout.cp == 1:
            message = f'{name}.cp_style = "{layout.cp_style}" needs {name}.cp of 2 or more, not 1; or leave it out'
            yield RecipeError(message, key=f"{name}.cp_style")
        if recipe.train.parity and layout.cp > 1:
            message = f"train.parity = true needs {name}.cp = 1, not {layout.cp}: parts of a softmax round differently"
            yield RecipeError(message, key="train.parity.cp")
        if "noise_scale" in recipe.train.watch and role == "policy" and partial:
            right = " and ".join(f"{axis} = 1" for axis in over("tokens", *MODEL))
            message = f"train.watch noise_scale needs whole gradients: {name}.{right}; or leave it out"
            yield RecipeError(message, key="train.watch")


def _stages(recipe: Recipe, name: str, layout: LayoutConfig) -> _Errors:
    """Check what a pipeline does not do."""
    key, schedule = f"{name}.pp_schedule", layout.pp_schedule
    if layout.pp == 1 and schedule != LayoutConfig().pp_schedule:
        message = f"{key} = {schedule} orders the stages of {name}.pp, which is 1; set pp to 2 or more, or leave it out"
        yield RecipeError(message, key=key)
    if schedule == "zero-bubble" and recipe.train.compile:
        message = f"{key} = zero-bubble needs train.compile = false: it splits the backward pass"
        yield RecipeError(f"{message}; or use 1f1b or interleaved", key=f"{key}.compile")


def _copied(spec: RoleSpec, layout: LayoutConfig) -> _Errors:
    """Check that a layout divides rows alone, of engines also their model along tp."""
    takes = ENGINE_AXES if spec.mesh == "engines" else ("dp",)
    sizes = [(n, getattr(layout, n), "1") for n, axis in AXES.items() if n not in takes and axis.splits != ("rows",)]
    modes = [(n, getattr(layout, n), str(right).lower()) for n, right in LayoutConfig() if n not in AXES]
    for name, value, right in (*sizes, *modes):
        key, found = f"{spec.key}.layout.{name}", str(value).lower()
        if found != right:
            what = f"the {spec.name} engine" if spec.mesh == "engines" else spec.name
            message = f"{key} = {found}, but {what} takes {_listed(takes)} only; set it to {right}"
            yield RecipeError(message, key=f"{key}.copies")


def _listed(names: tuple[str, ...]) -> str:
    """Format names: "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _divided_engine(recipe: Recipe, role: str, axis: str, size: int) -> _Errors:
    """Check what an engine over several ranks does not have."""
    key, r = f"{role}.layout.{axis}", recipe.rollout
    if size == 1:
        return
    if r.engine != "native":
        message = f"{key} = {size}, but rollout.engine = {r.engine} is not divided by Tilth; set {key} = 1"
        yield RecipeError(message, key=f"{key}.engine")
    if role == "rollout" and r.compile:
        message = f"{key} = {size} has collectives in every step, which rollout.compile = true does not compile; "
        yield RecipeError(f"{message}set one of them to its default", key=f"rollout.compile.{axis}")
    if role == "rollout" and recipe.train.parity:
        message = f"train.parity = true needs {key} = 1, not {size}: partial sums round differently"
        yield RecipeError(message, key=f"train.parity.{axis}")
