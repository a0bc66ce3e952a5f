"""What must hold between the keys of a recipe, as far as it can be known without the model and the data."""

import difflib
import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tilth.config.axes import AXES, MODEL, over
from tilth.config.errors import RecipeError
from tilth.config.flows import FLOWS, OPTIONAL
from tilth.config.plugins import declared, keyword_options, task_names
from tilth.config.roles import ROLES, SHIPPED_ROLES, RoleSpec, resolve, roles_of
from tilth.config.schema import AlgorithmConfig, LayoutConfig, Recipe
from tilth.config.tasks import task_of

KV_BLOCK = 16
"""Tokens of a block of the rollout engine's cache."""
MOST_PROFILED = 100
"""Steps in one profile: each operation of each step is kept in memory until the last one."""


def check(recipe: Recipe) -> None:
    """Raise ``RecipeError`` for the first two keys that contradict each other."""
    for rule in (_shape, _lengths, _parity, _learning, _places, _tasks):
        for problem in rule(recipe):
            raise RecipeError(problem)
    check_cluster(recipe)


def check_cluster(recipe: Recipe) -> None:
    """Raise ``RecipeError`` where workers, pools and layouts contradict each other or what else the recipe asks for."""
    for rule in (_roles, _workers, _pools, _fill, _divided, _limits, _profile):
        for problem in rule(recipe):
            raise RecipeError(problem)


def _shape(recipe: Recipe) -> Iterator[str]:
    m = recipe.model
    if m.optimizer and not m.path:
        yield "model.optimizer = true needs a run in model.path, whose optimizer it is"
    if m.path:
        return
    if not m.head_dim and m.hidden % m.heads:
        yield f"model.hidden = {m.hidden} is not a multiple of model.heads = {m.heads}; or set model.head_dim"
    width = m.head_dim or m.hidden // m.heads
    if width < 2 or width % 2:
        yield f"a head is {width} wide (model.head_dim, or hidden / heads); rotary embedding needs an even width"
    if m.kv_heads and m.heads % m.kv_heads:
        yield f"model.kv_heads = {m.kv_heads} does not divide model.heads = {m.heads}"


def _lengths(recipe: Recipe) -> Iterator[str]:
    context, r = recipe.model.context, recipe.rollout
    if recipe.flow_spec.learns == "documents":  # generates nothing
        return
    if r.max_tokens >= context:
        yield f"rollout.max_tokens = {r.max_tokens} leaves no room for a prompt in model.context = {context}"
    least = -(-context // KV_BLOCK) * KV_BLOCK
    if r.kv_tokens and r.kv_tokens < least:
        yield (
            f"rollout.kv_tokens = {r.kv_tokens} does not hold one sequence of model.context = {context}; "
            f"at least {least}, or 0: automatic"
        )


def _parity(recipe: Recipe) -> Iterator[str]:
    t = recipe.train
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", t.device):
        yield f"train.device = {t.device!r} is not auto, cpu, cuda or cuda:N"
    if not t.parity:
        return
    if t.device.startswith("cuda"):
        yield f"train.parity = true holds on a CPU only; train.device is {t.device!r}"
    for name, on in (("train.compile", t.compile), ("rollout.compile", recipe.rollout.compile)):
        if on:
            yield f"train.parity = true needs eager kernels; set {name} = false"


def _learning(recipe: Recipe) -> Iterator[str]:
    a, r, w = recipe.algorithm, recipe.rollout, recipe.supervised
    supervised = bool(w.steps or w.epochs)
    if not recipe.flow_spec.samples and not supervised:
        yield f"nothing to train: flow = {recipe.flow}, and supervised.steps and supervised.epochs are both 0"
    if not a.steps and not supervised:
        yield "nothing to train: algorithm.steps and supervised.steps are both 0"
    if recipe.model.dropout and recipe.flow_spec.samples and not supervised:
        yield (
            f"model.dropout = {recipe.model.dropout} has no use in flow = {recipe.flow} without supervised steps: "
            "policy gradients have none, as rollouts have none; set it to 0, or supervised.steps"
        )
    if supervised and w.until < 1 and recipe.data.holdout == 0 and not recipe.data.heldout:
        yield f"supervised.until = {w.until} needs held-out prompts; data.holdout is 0 and data.heldout empty"
    if recipe.data.holdout == 1 and not recipe.data.heldout:
        yield "data.holdout = 1 leaves no prompt to train on"
    if a.dual_clip and a.dual_clip < 1:
        yield f"algorithm.dual_clip = {a.dual_clip} is neither 0 (none) nor at least 1"
    if recipe.flow_spec.samples and a.kl_target and not a.kl_coef:
        yield f"algorithm.kl_target = {a.kl_target} adapts algorithm.kl_coef, which is 0; give it a value to begin with"
    if recipe.flow_spec.samples and a.kl_target and 5 * a.kl_horizon <= r.prompts * r.group:
        yield (
            f"algorithm.kl_horizon = {a.kl_horizon} is no more than a fifth of the {r.prompts * r.group} samples of a "
            "step, so that the weight could turn negative"
        )
    if recipe.flow_spec.samples and a.entropy_target and a.entropy_coef < 0:
        yield f"algorithm.entropy_coef = {a.entropy_coef} is below 0, where algorithm.entropy_target adapts it"
    if recipe.reference.path and not recipe.refers:
        yield f"reference.path = {recipe.reference.path} has no use: algorithm.kl_coef is 0"
    if (
        recipe.reward.model_weight != type(recipe.reward).model_fields["model_weight"].default
        and not recipe.reward.model
    ):
        yield f"reward.model_weight = {recipe.reward.model_weight} has no use: reward.model is empty"
    if recipe.flow == "distill" and not recipe.reference.path:
        yield "flow = distill learns from the model in reference.path, which is empty"
    if recipe.flow_spec.judge and not recipe.judge.path:
        yield f"flow = {recipe.flow} asks the model in judge.path, which is empty; recipe flaws-judge trains one"
    if recipe.judge.path and not recipe.flow_spec.judge:
        yield f"judge.path = {recipe.judge.path} has no use in flow = {recipe.flow}; set flow = fapo"
    if a.clip_low > 1:
        yield f"algorithm.clip_low = {a.clip_low} is above 1: a ratio cannot fall below 0"
    if recipe.flow_spec.samples and a.steps:
        yield from _experience(recipe)
    if recipe.flow_spec.learns == "pairs":
        yield from _pairs(recipe)
    if a.minibatches > r.prompts * r.group:
        yield f"algorithm.minibatches = {a.minibatches} is more than rollout.prompts x group = {r.prompts * r.group}"


def _experience(recipe: Recipe) -> Iterator[str]:
    a, flow = recipe.algorithm, recipe.flow
    for key in sorted(OPTIONAL - recipe.flow_spec.reads):
        if getattr(a, key) != AlgorithmConfig.model_fields[key].default:
            who = ", ".join(name for name, other in FLOWS.items() if other.samples and key in other.reads)
            yield f"algorithm.{key} = {getattr(a, key)} has no use in flow = {flow}; it is of {who}"
    grouped = flow == "rloo" or bool(recipe.flow_spec.reads & {"drop_flat"} and (a.drop_flat or a.refill))
    if recipe.rollout.temperature == 0:
        yield f"rollout.temperature = 0 samples the same completion each time; flow {recipe.flow} needs it above 0"
    if recipe.rollout.group == 1 and grouped:
        why = "has nothing to compare a sample with" if flow == "rloo" else "with drop_flat or refill keeps no group"
        yield f"rollout.group = 1 in flow = {flow} {why}; use a group of 2 or more"


def _pairs(recipe: Recipe) -> Iterator[str]:
    if recipe.reward.model:
        yield f"reward.model is for flows that learn from experience; flow = {recipe.flow} learns from pairs"
    if recipe.model.dropout:
        yield f"model.dropout = {recipe.model.dropout}: flow = {recipe.flow} compares whole answers; set it to 0"
    if recipe.flow == "reward_model" and recipe.preference.sft:
        yield f"preference.sft = {recipe.preference.sft}: a reward model has no likelihood; it is for flow = dpo"


def _places(recipe: Recipe) -> Iterator[str]:
    name = recipe.run.name
    if "/" in name or name in (".", ".."):
        yield f"run.name = {name!r} is a path; give the name of a folder in run.dir"
    if "@" in name:
        right = name.replace("@", "-")
        yield f"run.name = {name!r} has an @, as in RUN@best, which names a checkpoint; leave it out, as in {right}"
    where = recipe.run.checkpoints
    if found := re.match(r"([A-Za-z][\w+.-]+):/(?!/)", where):
        right = f"{found[1]}://{where[found.end() :]}"
        yield f"run.checkpoints = {where!r} is no URL; write {right}, or ./{where} for a folder of that name"
    if not recipe.run.dir:
        yield "run.dir is empty; give a folder, such as runs"


# ---- workers, pools and layouts ----


def pools(recipe: Recipe) -> dict[str, int]:
    """Name of each pool -> its workers, the default first; without ``cluster.pools`` one of all, named ""."""
    return dict(recipe.cluster.pools) or {"": recipe.cluster.workers}


def pool_of(recipe: Recipe, role: str) -> str:
    """The pool of a role."""
    return str(ROLES[role].placed_by(recipe).pool) or next(iter(pools(recipe)))


def learners(recipe: Recipe) -> dict[str, LayoutConfig]:
    """Layouts of the roles of the recipe's flow whose models are divided by one."""
    found = {name: spec for name, spec in roles_of(recipe).items() if spec.mesh == "layout"}
    return {name: spec.placed_by(recipe).layout for name, spec in found.items()}


def _roles(recipe: Recipe) -> Iterator[str]:
    """Roles of plugins: those that the flow calls are declared, and what is said of them has a use."""
    wanted, brought = recipe.flow_spec.roles, [name for name in ROLES if name not in SHIPPED_ROLES]
    for name in sorted(wanted - ROLES.keys()):
        yield f"flow = {recipe.flow} calls role {name!r}, which no plugin declares{_near(name, brought)}"
    for name, section in recipe.roles.items():
        if name not in wanted or name in SHIPPED_ROLES:
            yield f"roles.{name} has no use in flow = {recipe.flow}{_near(name, sorted(wanted - SHIPPED_ROLES))}"
        elif ROLES[name].mesh == "one" and section.layout != LayoutConfig():
            yield f"roles.{name}.layout has no use: {name} is one worker; leave it out"
        elif section.path and not ROLES[name].loads:
            yield f"roles.{name}.path = {section.path} has no use: {name} loads no model; leave it out"
        else:
            yield from _options(ROLES[name].key, name, keyword_options(resolve(ROLES[name].worker)), section.options)


def _tasks(recipe: Recipe) -> Iterator[str]:
    """Tasks of plugins ask for keys of [data] that there are, and options are those of a task."""
    named = [name for name in (recipe.data.source, recipe.data.heldout) if name in task_names()]
    kinds: dict[str, Any] = {}
    for name in named if recipe.data.options else filter(declared("task").__contains__, named):
        prompts = task_of(name).prompts
        kinds |= (own := keyword_options(prompts))
        for key in inspect.signature(prompts).parameters.keys() - own.keys() - type(recipe.data).model_fields.keys():
            yield f"task {name!r}: its prompts ask for {key!r}, no key of [data]; an option stands after *"
    yield from _options("data", " and ".join(named) or "a source of files", kinds, recipe.data.options)


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else f"; there is {', '.join(known) or 'none'}"


def _options(key: str, whose: str, kinds: Mapping[str, Any], options: Mapping[str, object]) -> Iterator[str]:
    for name, value in options.items():
        if name not in kinds:
            yield f"{key}.options.{name}: {whose} has no such option{_near(name, list(kinds))}"
        elif kinds[name] is not inspect.Parameter.empty:
            try:
                TypeAdapter(kinds[name]).validate_python(value, strict=True)
            except ValidationError as error:
                yield f"{key}.options.{name} = {value!r}: {error.errors()[0]['msg']}"


def _workers(recipe: Recipe) -> Iterator[str]:
    c, total = recipe.cluster, sum(pools(recipe).values())
    if c.pools and c.workers not in (1, total):
        yield f"cluster.workers = {c.workers}, but cluster.pools have {total} together; leave cluster.workers out"
    if "" in c.pools:
        yield "cluster.pools has a pool without a name; name it, as in cluster.pools.train=2"
    if c.backend == "inline" and total > 1:
        name = "cluster.pools" if c.pools else "cluster.workers"
        yield f"{name} = {total} workers, and cluster.backend = inline is one process; set it to local or ray"
    if c.backend == "local" and total > 1 and ":" in recipe.train.device:
        yield f"train.device = {recipe.train.device!r} is one GPU for {total} workers; use cuda: each takes its own"


def _pools(recipe: Recipe) -> Iterator[str]:
    known = list(recipe.cluster.pools)
    for spec in ROLES.values():
        role, wanted = spec.key, spec.placed_by(recipe).pool
        if not wanted or wanted in known or spec.section:
            continue
        right = _near(wanted, known) if known else f"; set cluster.pools.{wanted} = WORKERS, or leave {role}.pool out"
        yield f"{role}.pool = {wanted!r} is not in cluster.pools{right}"


def _limits(recipe: Recipe) -> Iterator[str]:
    c, r = recipe.cluster, recipe.reward
    if c.backend != "inline" and recipe.flow_spec.learns != "documents" and c.timeout < 2 * r.timeout:
        yield (
            f"cluster.timeout = {c.timeout:g} s for a call does not leave room for a reward of reward.timeout = "
            f"{r.timeout:g} s; set cluster.timeout to {2 * r.timeout:g} or more, or a smaller reward.timeout"
        )


def _profile(recipe: Recipe) -> Iterator[str]:
    r, steps = recipe.run, profiled(recipe)
    if r.profile and not 0 < len(steps) <= MOST_PROFILED:
        yield (
            f"run.profile = {r.profile!r} is not A:B with 1 <= A < B <= A + {MOST_PROFILED}, as in 10:12 for steps 10 "
            "and 11"
        )
    if r.profile:
        yield from (f"run.profile_ranks: {problem}" for problem in unknown_ranks(recipe, r.profile_ranks))


def profiled(recipe: Recipe) -> range:
    """The steps of ``run.profile``; none where it is empty, or says nothing of use."""
    found = re.fullmatch(r"([1-9]\d{0,17}):(\d{1,18})", recipe.run.profile)
    return range(int(found[1]), int(found[2])) if found else range(0)


def unknown_ranks(recipe: Recipe, ranks: Sequence[int]) -> Iterator[str]:
    """What is wrong with these ranks of workers: each must be one of the recipe's, and there must be one."""
    workers = sum(pools(recipe).values())
    right = f"the workers are ranks 0 to {workers - 1}" if workers > 1 else "the one worker is rank 0"
    if not ranks:
        yield f"no rank is named; {right}"
    for rank in ranks:
        if not 0 <= rank < workers:
            yield f"there is no rank {rank}; {right}"


def _fill(recipe: Recipe) -> Iterator[str]:
    for role, spec in roles_of(recipe).items():
        if spec.mesh == "one":
            continue
        pool = pool_of(recipe, role)
        workers = pools(recipe)[pool]
        where = f"the {workers} workers of pool {pool}" if pool else f"cluster.workers = {workers}"
        yield from _filled(f"{spec.key}.layout", spec.placed_by(recipe).layout, workers, where)


def _filled(name: str, layout: LayoutConfig, workers: int, where: str) -> Iterator[str]:
    sizes, rest, others = layout.sizes(workers), workers, ""
    for axis in reversed(AXES.values()):
        size = sizes[axis.name]
        if not axis.fills and rest % size:
            yield f"{name}.{axis.name} = {size} does not divide {where}{others}; {axis.name} may be {_divisors(rest)}"
            return
        if not axis.fills and size > 1:
            rest, others = rest // size, f"{others or ' with'} {name}.{axis.name} = {size}"
    taken, (fills,) = math.prod(sizes.values()), (axis.name for axis in AXES.values() if axis.fills)
    if taken != workers:
        verb = "does not fill" if taken < workers else "is more than"
        product = f"{name} {' x '.join(sizes)} = {' x '.join(map(str, sizes.values()))} = {taken}"
        yield f"{product} {verb} {where}; {fills} = {rest} would, or 0: automatic"


def _divisors(number: int) -> str:
    *most, last = [str(d) for d in range(1, number + 1) if number % d == 0]
    return f"{', '.join(most)} or {last}" if most else last


def _divided(recipe: Recipe) -> Iterator[str]:
    """What a division of the model rules out."""
    for spec in roles_of(recipe).values():
        if spec.mesh == "copies":
            yield from _copied(spec, spec.placed_by(recipe).layout)
    for role, layout in learners(recipe).items():
        name, model = f"{ROLES[role].key}.layout", any(getattr(layout, axis) > 1 for axis in over(*MODEL))
        if layout.sp and layout.tp == 1:
            yield f"{name}.sp = true divides over {name}.tp, which is 1; set tp to 2 or more, or sp = false"
        if recipe.train.parity and layout.tp > 1:
            yield f"train.parity = true needs {name}.tp = 1, not {layout.tp}: partial sums round differently"
        if "noise_scale" in recipe.train.watch and role == "policy" and model:
            right = " and ".join(f"{axis} = 1" for axis in over(*MODEL))
            yield f"train.watch noise_scale needs whole gradients: {name}.{right}; or leave it out"


def _copied(spec: RoleSpec, layout: LayoutConfig) -> Iterator[str]:
    """A whole copy is not divided."""
    sizes = [(name, getattr(layout, name), "1") for name, axis in AXES.items() if axis.splits != ("rows",)]
    for key, value, right in (*sizes, ("sp", layout.sp, "false")):
        found = str(value).lower()
        if found != right:
            yield f"{spec.key}.layout.{key} = {found}, but the {spec.name} engine takes dp only; set it to {right}"
