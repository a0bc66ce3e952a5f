"""The recipe: everything a user can ask for, as few and as orthogonal keys as possible. Imports no torch.

A recipe is a TOML file of these sections. Every key has a default, so a recipe states only what it means.
"""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from tilth.config.axes import AXES
from tilth.config.flows import FLOWS, REFERENCE_FREE, Flow, below, own_defaults
from tilth.config.open_sets import OPTIMIZERS, TRACKERS, OneOf
from tilth.config.plugins import BACKENDS, ENGINES, declared, family_names, load_plugins, shared_defaults, shipped_tasks

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=0)]
Weight = Annotated[float, Field(ge=-1e9, le=1e9)]
"""Of something in a reward, which fp32 must be able to hold (``rewards.LARGEST``)."""
Penalty = Annotated[float, Field(ge=0, le=1e9)]
Share = Annotated[float, Field(ge=0, le=1)]
Precision = Literal["fp32", "bf16"]
Option = bool | int | float | str | tuple[str, ...] | tuple[float, ...] | dict[str, float | tuple[float, float]]
Options = dict[str, Option]
"""Options of an algorithm that have no key of their own."""


class Section(BaseModel):
    """Base of all sections: unknown keys and wrong types are errors (a 3.0 is no integer), values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


_KEYS: dict[str, Any] = {
    axis.name: (Count, Field(0, description=axis.about)) if axis.fills else (Positive, Field(1, description=axis.about))
    for axis in AXES.values()
}


class LayoutConfig(create_model("Sizes", __base__=Section, **_KEYS)):  # type: ignore[misc]
    """How a role lies over the workers of its pool: a size for each axis, their product all of the pool's."""

    sp: bool = Field(False, description="with tp: norms and residual stream divided over its ranks by tokens too")
    zero: Literal[2, 3] = Field(3, description="with fsdp: parameters gathered once a step (2) or a micro-batch (3)")

    def sizes(self, workers: int) -> dict[str, int]:
        """Size of each axis over a pool of N workers."""
        found = {name: getattr(self, name) for name in AXES}
        rest = math.prod(size or 1 for size in found.values())
        return {name: size or workers // rest for name, size in found.items()}


class RoleSection(Section):
    """Where a role is."""

    pool: str = Field("", description="pool of workers that it is on; empty: the first one")
    layout: LayoutConfig = Field(
        LayoutConfig(), description="how it lies over its pool; an engine: dp alone, a whole copy each"
    )


class ModelConfig(Section):
    """What is trained: a model to start from, or the shape of a new decoder."""

    LOADED: ClassVar[frozenset[str]] = frozenset({"path", "optimizer", "context", "dropout"})
    """Keys that hold for a model that is loaded, too; the others are a new one's shape."""

    path: str = Field(
        "",
        description="run, Hugging Face directory or id of the hub (ORG/NAME) to start from, which has its own shape; "
        "empty: a new model of this one",
    )
    optimizer: bool = Field(False, description="with a run in model.path: begin with the state of its optimizer too")
    family: Annotated[str, OneOf(family_names)] = Field("qwen3", description="architecture of a new model")
    hidden: Positive = Field(128, description="width of the residual stream")
    layers: Positive = Field(4, description="number of decoder layers")
    heads: Positive = Field(4, description="query heads")
    kv_heads: Count = Field(0, description="key/value heads; 0: as many as query heads")
    head_dim: Count = Field(0, description="width of a head; 0: hidden / heads")
    ffn: Count = Field(0, description="inner width of the SwiGLU; 0: 8/3 of hidden, rounded up to 64")
    context: Positive = Field(256, description="longest sequence in tokens, prompt and completion together")
    rope_theta: float = Field(10_000.0, gt=0, description="base of the rotary embedding")
    tied: bool = Field(True, description="one matrix for embedding and output head")
    dropout: Share = Field(
        0.0, description="dropout on both residual branches in supervised learning; none in policy gradients"
    )


class DataConfig(Section):
    """What it learns from."""

    source: str = Field(
        "addition",
        description=f"a task ({', '.join(shipped_tasks())}), or files: JSONL, JSON, CSV, Parquet, Arrow, "
        "text, compressed or not, a dataset directory, a folder or a pattern of such files",
    )
    columns: dict[Literal["prompt", "answer", "messages", "text", "chosen", "rejected", "margin"], str] = Field(
        {},
        description="which column is which: a name, a path (reward_model.ground_truth) or a pattern (Q: {question}); "
        "a column of that very name needs no word",
    )
    digits: int = Field(
        3, ge=1, le=9, description="digits of the numbers of a task (countdown, sorting: at most this many)"
    )
    length: int = Field(4, ge=2, le=64, description="numbers of a list (sorting), steps of a chain (chain, flaws)")
    flawed: Share = Field(
        0.5, description="share of given solutions with a wrong step though the answer is right (chain, flaws)"
    )
    options: Options = Field({}, description="options of a task of a plugin, as in {most = 30}")
    heldout: str = Field("", description="a source of its own to evaluate on; empty: a share of data.source")
    holdout: Share = Field(0.1, description="share of prompts held out for evaluation, chosen by hash of the prompt")
    tokenizer: str = Field(
        "",
        description="tokenizer.json or its directory, characters, or bpe:SIZE to train one on the data; "
        "empty: the model's own, or characters",
    )
    template: str = Field(
        "",
        description="how a prompt and its answer become text: model (its chat template), chatml, or a Jinja file; "
        "empty: one after the other as they stand",
    )


class SupervisedConfig(Section):
    """Learning from given text: the whole of flows pretrain and sft, a warm-up before reinforcement learning."""

    steps: Count = Field(0, description="most supervised steps; 0: by epochs, or none")
    epochs: Rate = Field(0.0, description="passes over the data, where steps is 0")
    until: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="stop early at this held-out accuracy, or mean reward"
    )
    check_every: Positive = Field(10, description="steps between two evaluations on what is held out")
    batch: Positive = Field(256, description="examples (pretrain: pieces of documents) a step")
    lr: Rate = Field(2e-3, description="peak learning rate of this phase")


class RolloutConfig(RoleSection):
    """How experience is generated."""

    prompts: Positive = Field(64, description="prompts a step")
    group: Positive = Field(8, description="samples for each prompt")
    max_tokens: Positive = Field(32, description="longest completion in tokens")
    temperature: Rate = Field(1.0, description="softmax temperature of sampling; 0: greedy")
    top_k: Count = Field(0, description="keep the k likeliest tokens; 0: all")
    top_p: float = Field(1.0, gt=0, le=1, description="keep the smallest set of tokens with this mass")
    min_p: Share = Field(0.0, description="keep tokens at least this share as likely as the likeliest")
    stop: tuple[str, ...] = Field(
        (), description="strings that end a completion, besides the end token; special tokens too"
    )
    max_rows: Positive = Field(512, description="most sequences decoded at once")
    kv_tokens: Count = Field(0, description="KV cache in tokens; 0: max_rows times the context")
    step_tokens: Positive = Field(
        8192, description="token budget of one engine step, decode first, then prefill chunks"
    )
    compile: bool = Field(False, description="torch.compile the decode step (CUDA graphs on a GPU)")
    engine: Annotated[str, OneOf(lambda: [*ENGINES, *declared("engine")])] = Field(
        "native", description="generation engine; your own comes from a plugin"
    )


class RewardConfig(Section):
    """What is good."""

    function: str | dict[str, float] = Field(
        "",
        description=f"FILE.py:function, module:function, a verifier ({', '.join(shipped_tasks())}, gsm8k, "
        'exact, regex:PATTERN), or several, as in {gsm8k = 1.0, "regex:####" = 0.1}; empty: the task\'s own',
    )
    model: str = Field("", description="run of flow reward_model whose score is a reward too; empty: none")
    model_weight: Weight = Field(1.0, description="weight of its score, which is added to the function's reward")
    timeout: float = Field(10.0, gt=0, description="seconds one call may take before its reward is missing")
    workers: Positive = Field(1, description="processes that score")
    pool: str = Field("", description="pool whose first worker starts the processes that score; empty: the first one")


class AlgorithmConfig(Section):
    """How rewards become updates."""

    advantage: str = Field("grpo", description="estimator, one of tilth.rl.names()")
    loss: str = Field("ppo_clip", description="policy loss, one of tilth.rl.names()")
    aggregation: str = Field("", description="how token losses become one number; empty: as the loss was published")
    options: Options = Field(
        {}, description="options of estimator, loss and correction without a key of their own, as in {alpha = 0.05}"
    )
    clip_low: Rate = Field(0.2, description="lower clip range of the ratio")
    clip_high: Rate = Field(0.2, description="upper clip range of the ratio")
    dual_clip: Rate = Field(0.0, description="bound on the loss of negative advantages (at least 1); 0: none")
    correction: str = Field(
        "", description="for samples of an engine that differs from the trainer: one of tilth.rl.names(); empty: none"
    )
    kl: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"] = Field(
        "k3", description="form of the KL penalty towards the reference; with + its gradient is that of k2"
    )
    kl_coef: Penalty = Field(0.0, description="its weight; 0: no reference model is kept")
    kl_in: Literal["loss", "reward"] = Field("loss", description="where the penalty goes")
    kl_target: Rate = Field(0.0, description="KL per token that its weight is adapted to; 0: the weight is fixed")
    kl_horizon: Positive = Field(10_000, description="samples over which the weight is adapted")
    entropy_coef: float = Field(0.0, description="weight of an entropy bonus")
    entropy_target: Rate = Field(
        0.0, description="entropy, in nats, below which the bonus grows; 0: its weight is fixed"
    )
    nll_coef: Rate = Field(0.0, description="weight of the likelihood of right answers in the loss (VAPO)")
    steps: Count = Field(100, description="training steps, each on one batch of experience")
    minibatches: Positive = Field(1, description="optimizer steps made of one batch")
    epochs: Positive = Field(1, description="passes over one batch")
    gamma: Share = Field(1.0, description="discount of estimators over tokens")
    lam: Share = Field(1.0, description="lambda of gae: 1 is reward-to-go minus value, 0 is one-step")
    drop_flat: bool = Field(
        True,
        description="leave out groups in which all rewards are equal, where they have no gradient: under estimators "
        "that give them 0, and without a KL, entropy or likelihood term",
    )
    refill: Count = Field(
        0,
        description="flows dapo and fapo: rounds of sampling, at most, until the batch is full of groups that are "
        "neither all right nor all wrong; 0: groups are taken as they come",
    )
    overlong_buffer: Share = Field(
        0.0, description="flows dapo and fapo: last share of rollout.max_tokens in which the reward falls; 0: none"
    )
    overlong_penalty: Penalty = Field(
        0.5,
        description="what it has fallen by at rollout.max_tokens (as published: half of the way from right to wrong)",
    )
    overlong_filter: bool = Field(False, description="flows dapo and fapo: cut completions have no part in the loss")


class PreferenceConfig(Section):
    """How pairs of answers become a loss, in flows dpo and reward_model; their steps are those of [supervised]."""

    loss: str = Field(
        "sigmoid", description="sigmoid (DPO), robust, hinge, ipo, simpo or your own; flow reward_model: bradley_terry"
    )
    beta: Rate = Field(0.0, description="scale of the implicit reward; 0: the loss's own (0.1, simpo 2)")
    smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="share of labels taken to be wrong; 0: the loss's own (0, robust 0.1)"
    )
    margin: float = Field(0.0, description="how far ahead the chosen answer should be (gamma of simpo), besides data's")
    average: bool = Field(False, description="sigmoid, robust, hinge: log-probs a token instead of summed ones")
    centring: Rate = Field(0.0, description="bradley_terry: weight of the squared sum of both scores, such as 0.01")
    sft: Rate = Field(0.0, description="weight of the likelihood of chosen answers (RPO)")

    @property
    def options(self) -> dict[str, Any]:
        """Those of the loss that are not left to it."""
        names = ("beta", "smoothing", "margin", "average", "centring")
        return {n: getattr(self, n) for n in names if getattr(self, n) != type(self).model_fields[n].default}


class RewardModelConfig(RoleSection):
    """Where the reward model of reward.model is."""


class PolicyConfig(RoleSection):
    """Where the model that learns is, and how it is compared with the rollout engine's copy."""

    probe_every: Count = Field(
        25, description="publishes between two comparisons of log-probs on a probe batch; 0: checksums only"
    )


class ReferenceConfig(RoleSection):
    """The model that a KL penalty holds the policy to, or that flow distill learns from."""

    path: str = Field(
        "", description="run or Hugging Face directory with the same tokens; empty: the policy as the phase began"
    )


class JudgeConfig(RoleSection):
    """The frozen model of flow fapo, which reads the steps of right answers and names the first wrong one."""

    path: str = Field("", description="run or Hugging Face directory of the judge, such as a run of flaws-judge")
    penalty: Penalty = Field(
        1.0, description="FAPO's lambda: half of it is what a right answer with a wrong step loses; 0: only measured"
    )
    max_tokens: Positive = Field(256, description="longest verdict in tokens, with what is said before it")


class CriticConfig(RoleSection):
    """The value model of flow ppo: a decoder like the policy, begun as its copy, with a value at each token."""

    lr: Rate = Field(1e-3, description="peak learning rate of the critic")
    steps: Count = Field(0, description="steps that train the critic alone before the policy moves")
    clip: Rate = Field(0.2, description="most that a value may move in an update before its loss is flat; 0: no clip")


class BroughtRole(RoleSection):
    """Where a role of a plugin is, and its options."""

    path: str = Field("", description="model that it loads: a run or Hugging Face directory")
    options: Options = Field({}, description="keyword arguments of its class")


class OptimizerConfig(Section):
    """How parameters move."""

    name: Annotated[str, OneOf(lambda: OPTIMIZERS)] = Field(
        "adamw", description="muon: block matrices by Muon, the rest by AdamW"
    )
    lr: Rate = Field(1e-4, description="peak learning rate")
    muon_lr_ratio: Rate = Field(10.0, description="learning rate of the block matrices under Muon, over lr")
    betas: tuple[Share, Share] = Field((0.9, 0.95), description="AdamW's decay of both moments")
    weight_decay: Rate = Field(0.0, description="decoupled weight decay of matrices")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "constant", description="learning rate over steps (wsd decays in the last fifth)"
    )
    warmup_steps: Count = Field(0, description="steps of linear rise to the peak")
    clip_norm: Rate = Field(1.0, description="bound on the global gradient norm; 0: none")


class TrainConfig(Section):
    """How the machine computes."""

    device: str = Field("auto", description="auto, cpu, cuda or cuda:N; auto: cuda where there is one")
    precision: Precision = Field("fp32", description="dtype of activations in trainer and engine; parameters stay fp32")
    matmul: Literal["highest", "high", "medium"] = Field(
        "highest", description="torch's fp32 matmul precision (medium is bf16 on a CPU with AMX)"
    )
    threads: Count = Field(0, description="CPU threads; 0: the physical cores")
    parity: bool = Field(False, description="trainer and engine agree bit for bit (CPU, eager)")
    micro_tokens: Positive = Field(16_384, description="most tokens in one forward and backward pass")
    checkpointing: bool = Field(False, description="recompute each layer's activations in the backward pass")
    compile: bool = Field(False, description="torch.compile the training forward and backward")
    nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="on a loss or gradient that is not finite: stop, or skip and count"
    )
    ema: Share = Field(0.0, description="decay of an exponential moving average of the weights, RUN@ema; 0: none")
    watch: tuple[Literal["noise_scale", "layer_norms"], ...] = Field(
        (), description="further metrics: gradient noise scale; norms of each layer's weights and gradients"
    )
    mismatch: Rate = Field(
        0.0,
        description="largest log-prob difference of trainer and engine; 0: 1e-3 in fp32, 0.5 in bf16, 2 if corrected",
    )


class RunConfig(Section):
    """What is kept, and when."""

    dir: str = Field("runs", description="folder of runs")
    name: str = Field("", description="name of the run's folder; empty: recipe and a number")
    eval_every: Count = Field(
        25, description="steps between two evaluations on held-out prompts; 0: first and last only"
    )
    eval_prompts: Positive = Field(512, description="held-out prompts in an evaluation")
    save_every: Positive = Field(25, description="steps between two checkpoints")
    save_minutes: Rate = Field(10.0, description="minutes after which one is made anyway, at a step's end; 0: never")
    save_background: bool = Field(True, description="training goes on while a copy in host memory is being written")
    save_failures: Count = Field(2, description="saves in a row that may fail before the run stops; each one is told")
    grace: float = Field(
        60.0, gt=0, description="seconds after SIGTERM or SIGHUP in which the run saves and ends, come what may"
    )
    checkpoints: str = Field(
        "", description="where they go: a folder or a store's URL (s3://bucket/path); empty: in the run"
    )
    keep: Positive = Field(2, description="newest checkpoints kept; the best one by evaluation stays too, RUN@best")
    keep_every: Count = Field(0, description="checkpoints of steps that are a multiple of this are kept too; 0: none")
    collect_every: Count = Field(
        0, description="steps between two collections of Python's garbage, on all ranks at once; 0: when Python likes"
    )
    track: tuple[Annotated[str, OneOf(lambda: (*TRACKERS, *declared("tracker")))], ...] = Field(
        (), description="trackers that get every metric too (wandb: offline unless WANDB_MODE says otherwise)"
    )
    prometheus: int = Field(
        0, ge=0, le=65535, description="port of 127.0.0.1 where Prometheus can fetch the newest metrics; 0: none"
    )
    profile: str = Field(
        "", description="steps A:B, B not included, that torch's profiler records, into RUN/profiles; empty: none"
    )
    profile_ranks: tuple[int, ...] = Field((0,), description="ranks that it records them on")


class ClusterConfig(Section):
    """Which workers there are."""

    backend: Annotated[str, OneOf(lambda: [*BACKENDS, *declared("backend")])] = Field(
        "inline",
        description="inline: this process; local: processes of this machine; ray: actors, on any number of them; "
        "your own comes from a plugin",
    )
    workers: Positive = Field(1, description="worker processes; with pools: their sum, which need not be said")
    pools: dict[str, Positive] = Field(
        {}, description="workers divided by name, as in {train = 2, rollout = 2}; empty: all in one"
    )
    timeout: float = Field(600.0, gt=0, description="seconds that one call may take before the run is stopped")
    address: str = Field("", description="of the Ray cluster to join; empty: one of this machine is started")


def _said(value: Any) -> Any:
    """What was said of a section, without its defaults."""
    return {name: getattr(value, name) for name in value.model_fields_set} if isinstance(value, Section) else value


class Recipe(Section):
    """A whole run. Sixteen sections and four keys of its own."""

    flow: Annotated[str, OneOf(lambda: FLOWS)] = Field(
        "grpo",
        description="the algorithm; or [supervised] alone: sft on answers, pretrain on whole texts, dpo and "
        "reward_model on pairs of answers",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="seed of every random number of the run")
    plugins: tuple[str, ...] = Field(
        (), description="code of your own, imported in every process: files ending in .py, or names of modules"
    )
    roles: dict[str, BroughtRole] = Field(
        {}, description="roles of plugins, as in roles.NAME.pool: a table of pool, layout, path and options for each"
    )
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    supervised: SupervisedConfig = SupervisedConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    preference: PreferenceConfig = PreferenceConfig()
    policy: PolicyConfig = PolicyConfig()
    reference: ReferenceConfig = ReferenceConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    judge: JudgeConfig = JudgeConfig()
    critic: CriticConfig = CriticConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    cluster: ClusterConfig = ClusterConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="wrap")
    @classmethod
    def _remember_said(cls, data: Any, check: Callable[[Any], "Recipe"]) -> "Recipe":
        """``algorithm.model_fields_set`` are the keys that somebody chose: neither defaults of a flow, nor all of them,
        as in what a run keeps."""
        recipe = check(cls._own_defaults(data))
        if isinstance(data, Mapping):
            chosen = set(_said(data.get("algorithm", {})))
            everything = chosen >= AlgorithmConfig.model_fields.keys()
            recipe.algorithm.model_fields_set.intersection_update(() if everything else chosen)
        return recipe

    @classmethod
    def _own_defaults(cls, data: Any) -> Any:
        """A flow's own defaults, and the clips of the chosen loss, lie below what is given."""
        if not isinstance(data, Mapping) or data.get("flow", "grpo") not in FLOWS:
            return data
        algorithm = _said(data.get("algorithm", {}))
        own = own_defaults(data.get("flow", "grpo"), algorithm)
        chosen = {**own.get("algorithm", {}), **(algorithm if isinstance(algorithm, Mapping) else {})}
        if brought := shared_defaults(str(chosen.get("advantage", "")), str(chosen.get("loss", ""))):
            own = {**own, "algorithm": {**own.get("algorithm", {}), **brought}}
        said = {name: _said(value) if name in own else value for name, value in data.items()}
        return below(said, own) if all(isinstance(said.get(name, {}), Mapping) for name in own) else data

    @property
    def flow_spec(self) -> Flow:
        """What is known of its flow."""
        return FLOWS[self.flow]

    @property
    def refers(self) -> bool:
        """Whether the run keeps a reference model."""
        if self.flow_spec.learns == "pairs":
            return self.flow_spec.reference and self.preference.loss not in REFERENCE_FREE
        return self.flow_spec.reference or bool(self.flow_spec.samples and self.algorithm.kl_coef)

    def section(self, name: str) -> Any:
        """A section by its name; ``roles.NAME`` of a role that the recipe says nothing of has the defaults."""
        role = name.removeprefix("roles.")
        return getattr(self, name) if role == name else self.roles.get(role, BroughtRole())

    def replaced(self, name: str, **values: Any) -> "Recipe":
        """With other values in one section."""
        section, role = self.section(name).model_copy(update=values), name.removeprefix("roles.")
        return self.model_copy(update={name: section} if role == name else {"roles": {**self.roles, role: section}})

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Restore a recipe that was pickled: a process that receives one imports its plugins."""
        super().__setstate__(state)
        load_plugins(self.plugins)

    def dump(self) -> dict[str, Any]:
        """Plain nested dictionaries, all keys."""
        return self.model_dump(mode="json")
