"""Schema of recipes: few, orthogonal keys in sections, each with a default. Imports no torch."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, PrivateAttr, model_validator

from tilth.config.flows import FLOWS, REFERENCE_FREE, Flow, below, own_defaults
from tilth.config.open_sets import COMPRESSORS, LOCAL_METHODS, OPTIMIZERS, TRACKERS, OneOf
from tilth.config.parts import (
    Adapters,
    Count,
    Fixed,
    LayoutConfig,
    LoraConfig,
    Option,
    Options,
    Penalty,
    Positive,
    Precision,
    Rate,
    RoleSection,
    Section,
    Share,
    Weight,
)
from tilth.config.plugins import BACKENDS, ENGINES, declared, family_names, load_plugins, shared_defaults, shipped_tasks

__all__ = ["LayoutConfig", "LoraConfig", "Option", "Options", "RoleSection", "Section", "Share"]
"""What other modules may import from here too."""


class ModelConfig(Section):
    """Trained model: one to start from, or the shape of a new decoder."""

    LOADED: ClassVar[frozenset[str]] = frozenset({"path", "adapter", "optimizer", "context", "dropout"})
    """Keys that apply to a loaded model too; the others are the shape of a new one."""

    path: str = Field(
        "",
        description="run, Hugging Face directory or id of the hub (ORG/NAME) to start from, with its own shape; "
        "empty: a new model of the shape below",
    )
    adapter: str = Field(
        "",
        description="directory of an adapter of model.path in PEFT's format: learned further with policy.lora, else "
        "merged into the weights",
    )
    optimizer: bool = Field(False, description="with a run in model.path: load its optimizer state too")
    family: Annotated[str, OneOf(family_names, "family")] = Field("qwen3", description="architecture of a new model")
    hidden: Positive = Field(128, description="width of the residual stream")
    layers: Positive = Field(4, description="number of decoder layers")
    heads: Positive = Field(4, description="query heads")
    kv_heads: Count = Field(0, description="key/value heads; 0: as many as query heads")
    head_dim: Count = Field(0, description="width of a head; 0: hidden / heads")
    ffn: Count = Field(0, description="inner width of the SwiGLU; 0: 8/3 of hidden, rounded up to 64")
    experts: Count = Field(0, description="families with experts: experts of a layer; 0: 8")
    experts_per_token: Positive = Field(2, description="families with experts: experts that a token goes through")
    expert_ffn: Count = Field(
        0, description="families with experts: inner width of an expert; 0: ffn / experts_per_token, rounded up to 8"
    )
    shared_experts: Count = Field(0, description="families with shared experts: experts that every token goes through")
    dense_layers: Count = Field(0, description="families with experts: first layers that have one SwiGLU instead")
    context: Positive = Field(256, description="maximum tokens of a sequence, prompt and completion together")
    rope_theta: float = Field(10_000.0, gt=0, description="base of the rotary embedding")
    tied: bool = Field(True, description="one matrix for embedding and output head")
    dropout: Annotated[Share, Fixed("")] = Field(
        0.0, description="dropout on both residual branches in supervised steps; policy gradients use none"
    )


ColumnRole = Literal["prompt", "answer", "messages", "tools", "text", "chosen", "rejected", "margin"]


Transform = Annotated[str, OneOf(lambda: ["", *declared("transform")], "transform")]


class MixtureSource(Section):
    """One source of a mixture."""

    name: str = Field("", description="its name in metrics and messages")
    source: str = Field("", description="a task or files, as data.source")
    columns: dict[ColumnRole, str] = Field({}, description="as data.columns; empty: those")
    template: str = Field("", description="as data.template; empty: that one")
    weight: Rate = Field(1.0, description="its share of the samples, divided by the sum of all weights")
    schedule: dict[Annotated[str, Field(pattern=r"^(0|[1-9]\d{0,17})$")], Rate] = Field(
        {}, description="factors of the weight from a step on, as in {0 = 1.0, 2000 = 0.2}"
    )
    schedule_by: Literal["steps", "tokens"] = Field(
        "steps", description="unit of the schedule: steps of a phase, or tokens that it has drawn"
    )
    filter: Transform = Field("", description="a plugin's transform, true for each record to keep; empty: all")
    transform: Transform = Field("", description="a plugin's transform, which returns a record in place of each")
    on_error: Literal["stop", "skip"] = Field(
        "stop", description="for a record that cannot be used: stop, or leave it out and count it"
    )
    at_end: Literal["repeat", "stop", "leave"] = Field(
        "repeat",
        description="when each of its samples has been drawn: go through them again in a new order, stop the run, or "
        "go on with the other sources",
    )


class DataConfig(Section):
    """Training data."""

    source: str = Field(
        "addition",
        description=f"a task ({', '.join(shipped_tasks())}), or files: JSONL, JSON, CSV, Parquet, Arrow, "
        "text, compressed or not, a dataset directory, a folder or a pattern of such files",
    )
    columns: dict[ColumnRole, str] = Field(
        {},
        description="columns of the data by role: a name, a path (reward_model.ground_truth) or a pattern "
        "(Q: {question}); a column with the name of its role needs no entry",
    )
    digits: int = Field(
        3, ge=1, le=9, description="digits of the numbers of a task (countdown, sorting: at most this many)"
    )
    length: int = Field(4, ge=2, le=64, description="numbers of a list (sorting), steps of a chain (chain, flaws)")
    flawed: Share = Field(
        0.5,
        description="share of given solutions with a wrong step but the right answer (chain, flaws), or that forget "
        "the last step (calculator, code_sandbox, retrieval, word_game)",
    )
    options: Options = Field({}, description="options of a plugin's task, as in {most = 30}")
    mixture: tuple[MixtureSource, ...] = Field(
        (), description="[sources](#sources-of-a-mixture) to draw from by weight, in place of data.source"
    )
    deduplicate: bool = Field(False, description="train on the first of equal samples of files alone, by a hash")
    packing: Literal["fit", "concat", "none"] = Field(
        "fit",
        description="fit: whole samples side by side in a micro-batch, without padding; concat: flow pretrain, pieces "
        "of exactly the context, across documents; none: a micro-batch for each sample",
    )
    loaders: Literal["auto"] | Count = Field(
        0,
        description="processes that read and tokenise samples, of the next step while this one computes; auto: as many "
        "as there are cores; 0: the loader's worker does it when a step asks",
    )
    shadows: int = Field(
        0, ge=0, le=1, description="processes beside each loader, ready to open the same sources if it is lost"
    )
    heldout: str = Field("", description="separate source for evaluation; empty: a share of each source")
    holdout: Share = Field(0.1, description="share of prompts held out for evaluation, chosen by hash of the prompt")
    tokenizer: str = Field(
        "",
        description="tokenizer.json or its directory, characters, or bpe:SIZE to train one on the data; "
        "empty: the model's own, or characters",
    )
    template: str = Field(
        "",
        description="template of prompt and answer: model (its chat template), chatml, or a Jinja file; "
        "empty: plain concatenation",
    )

    @model_validator(mode="before")
    @classmethod
    def _without_default_source(cls, given: Any) -> Any:
        """Leave ``source`` empty beside a mixture, unless it is set."""
        mixed = isinstance(given, Mapping) and given.get("mixture")
        return {"source": "", **given} if mixed else given

    @property
    def sources(self) -> tuple[MixtureSource, ...]:
        """Sources to train on: those of the mixture, or ``data.source`` as a mixture of one."""
        one = {"name": "source", "source": self.source, "columns": self.columns, "template": self.template}
        return self.mixture or (MixtureSource.model_validate(one),)


class SupervisedConfig(Section):
    """Learning from given text: all of flows pretrain and sft, a warm-up before reinforcement learning."""

    steps: Count = Field(0, description="maximum supervised steps; 0: set by epochs, or none")
    epochs: Rate = Field(0.0, description="passes over the data, if steps is 0")
    until: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="held-out accuracy, or mean reward, at which the phase stops early"
    )
    check_every: Positive = Field(10, description="steps between two evaluations on held-out data")
    batch: Positive = Field(256, description="examples (pretrain: pieces of documents) per step")
    lr: Rate = Field(2e-3, description="peak learning rate of this phase")


class DraftConfig(Section):
    """Drafts of completions, which passes of the engine verify."""

    tokens: Positive = Field(8, description="most tokens of a draft")
    depth: Positive = Field(8, description="longest run of newest tokens that is looked up in earlier completions")
    path: str = Field(
        "",
        description="speculate = model: run, checkpoint or Hugging Face directory of a small model with the policy's "
        "tokens",
    )
    apart: bool = Field(
        False, description="draft in a process of its own, which guesses on while a pass of the engine verifies"
    )


class RolloutConfig(RoleSection):
    """Generation of experience."""

    prompts: Positive = Field(64, description="prompts per step")
    group: Positive = Field(8, description="samples per prompt")
    max_tokens: Positive = Field(32, description="maximum tokens of a completion")
    partial: Count = Field(
        0,
        description="tokens of a completion in one step; a longer one goes on in the next step, under its weights, and "
        "is trained once its group is finished; an episode waits at the end of a turn; needs algorithm.correction; 0: "
        "no limit",
    )
    staleness: Literal["free"] | Count = Field(
        0,
        description="policy versions that a sample may be behind the step that trains it: above 0 the engines generate "
        "while the policy learns (rollout.inflight); free: no bound but rollout.buffer; 0: each step waits for its own "
        "samples",
    )
    buffer: Positive = Field(
        2, description="with staleness = free: most steps of samples that are in flight or wait to be trained"
    )
    inflight: Literal["update", "finish"] = Field(
        "update",
        description="with staleness above 0, samples in flight when new weights come: update: they go on under these; "
        "finish: a replica takes weights when its samples have ended, and begins none before, so that each sample has "
        "one version; native engine",
    )
    whole_every: Positive = Field(
        16,
        description="with staleness above 0 and engines on other nodes than the policy: of so many versions of the "
        "weights the first is sent whole, and of the others what has changed, which is lossless too",
    )
    order: Literal["fifo", "fresh"] = Field(
        "fifo",
        description="with staleness above 0: groups that a step takes first, those that ended first or those that were "
        "begun last; groups that reach the bound go before",
    )
    repack: bool = Field(
        False,
        description="with staleness above 0: where nothing waits, move the last samples of replicas to as few as hold "
        "them, so that the others take what comes next",
    )
    temperature: Rate = Field(1.0, description="softmax temperature of sampling; 0: greedy")
    top_k: Count = Field(0, description="keep the k likeliest tokens; 0: all")
    top_p: float = Field(1.0, gt=0, le=1, description="keep the smallest set of tokens with this mass")
    min_p: Share = Field(0.0, description="keep tokens at least this share as likely as the likeliest")
    stop: tuple[str, ...] = Field(
        (), description="strings, special tokens included, that end a completion besides the end token"
    )
    max_rows: Positive = Field(512, description="maximum sequences decoded at once")
    kv_tokens: Count = Field(0, description="KV cache in tokens; 0: max_rows times the context")
    step_tokens: Positive = Field(8192, description="token budget of an engine step: decode first, then prefill chunks")
    compile: bool = Field(False, description="torch.compile the decode step (CUDA graphs on a GPU)")
    speculate: Literal["off", "suffix", "tree", "model"] = Field(
        "off",
        description="compute several tokens of a completion in one pass, guessed from completions of the prompt, "
        "its group or its own text (tree: several guesses), or by a model (model); tokens stay those of plain "
        "decoding, but only with train.parity has a resume the same bits",
    )
    draft: DraftConfig = Field(DraftConfig(), description="drafts where rollout.speculate is on")
    run_ahead: bool = Field(
        False,
        description="answer prompts of the next step, greedily, in idle rows of engines, for drafts alone; not with "
        "staleness above 0, where engines begin the samples of later steps themselves",
    )
    engine: Annotated[str, OneOf(lambda: [*ENGINES, *declared("engine")], "engine")] = Field(
        "native", description="generation engine; plugins can add others"
    )
    adapters: Literal["merged", "adapter"] = Field(
        "merged",
        description="how engines get a policy that learns adapters: weights with these merged in, or the base once "
        "and A and B alone from then on",
    )
    python: str = Field("", description="interpreter of an environment that has vLLM or SGLang; empty: this one")
    options: Options = Field({}, description="further arguments of the engine, as in {gpu_memory_utilization = 0.5}")
    environment: str = Field(
        "",
        description="environment of episodes of several turns: a task's, a plugin's class or FILE.py:Class; it gives "
        "the reward; empty: single answers",
    )
    serve: bool = Field(
        False,
        description="rollout.environment is a tilth.Agent, code of any client of OpenAI or Anthropic: the policy "
        "answers its calls of a server on this machine, and is trained on them",
    )
    turns: Positive = Field(8, description="most turns of the policy in an episode")
    turn_seconds: float = Field(
        10.0, gt=0, description="limit of one call of an environment; an episode beyond it gives no reward"
    )
    environments: Positive = Field(1, description="processes with environments beside each engine")
    tool_schemas: bool = Field(
        False,
        description="draw only such tokens that calls <tool_call>...</tool_call> name a tool of the environment, with "
        "arguments of its schema (library llguidance)",
    )


class RewardConfig(Section):
    """Reward function and the processes that run it."""

    function: str | dict[str, float] = Field(
        "",
        description=f"FILE.py:function, module:function, a verifier ({', '.join(shipped_tasks())}, gsm8k, "
        'exact, regex:PATTERN), or several, as in {gsm8k = 1.0, "regex:####" = 0.1}; empty: the task\'s own',
    )
    model: str = Field("", description="run of flow reward_model, whose score is added to the reward; empty: none")
    model_weight: Weight = Field(1.0, description="weight of this score")
    timeout: float = Field(10.0, gt=0, description="limit of one call in seconds; a call beyond it gives no reward")
    workers: Positive = Field(1, description="reward processes")
    pool: str = Field("", description="pool whose first worker starts the reward processes; empty: the first one")


class AlgorithmConfig(Section):
    """Advantages, loss and KL: how rewards become updates."""

    advantage: str = Field("grpo", description="estimator, one of tilth.rl.names()")
    loss: str = Field("ppo_clip", description="policy loss, one of tilth.rl.names()")
    aggregation: str = Field("", description="reduction of token losses to one number; empty: the published one")
    options: Options = Field({}, description="further options of estimator, loss and correction, as in {alpha = 0.05}")
    clip_low: Rate = Field(0.2, description="lower clip range of the ratio")
    clip_high: Rate = Field(0.2, description="upper clip range of the ratio")
    dual_clip: Rate = Field(0.0, description="bound on the loss of negative advantages (at least 1); 0: none")
    correction: str = Field(
        "", description="correction of samples if engine and trainer differ: one of tilth.rl.names(); empty: none"
    )
    kl: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"] = Field(
        "k3", description="estimator of the KL penalty towards the reference; with +, the gradient of k2"
    )
    kl_coef: Penalty = Field(0.0, description="weight of the KL penalty; 0: no reference model")
    kl_in: Literal["loss", "reward"] = Field("loss", description="place of the KL penalty")
    kl_target: Rate = Field(0.0, description="KL per token that adapts kl_coef; 0: fixed kl_coef")
    kl_horizon: Positive = Field(10_000, description="samples over which kl_coef adapts")
    entropy_coef: float = Field(0.0, description="weight of an entropy bonus")
    entropy_target: Rate = Field(
        0.0, description="entropy in nats below which entropy_coef grows; 0: fixed entropy_coef"
    )
    nll_coef: Rate = Field(0.0, description="weight of the NLL loss of right answers (VAPO)")
    steps: Count = Field(100, description="training steps, each on one batch of experience")
    minibatches: Positive = Field(1, description="optimizer steps per pass over a batch")
    epochs: Positive = Field(1, description="passes over one batch")
    gamma: Share = Field(1.0, description="discount of estimators over tokens")
    lam: Share = Field(1.0, description="lambda of gae: 1 is reward-to-go minus value, 0 is one-step")
    drop_flat: bool = Field(
        True,
        description="drop groups with equal rewards if they have no gradient: with estimators that give them 0 and "
        "without a KL, entropy or likelihood term",
    )
    refill: Count = Field(
        0,
        description="flows dapo and fapo: maximum rounds of sampling to fill the batch with groups that are neither "
        "all right nor all wrong; 0: keep all groups",
    )
    overlong_buffer: Share = Field(
        0.0, description="flows dapo and fapo: last share of rollout.max_tokens, in which the reward falls; 0: none"
    )
    overlong_penalty: Penalty = Field(
        0.5,
        description="decrease of the reward at rollout.max_tokens (as published: half the distance of right and wrong)",
    )
    overlong_filter: bool = Field(False, description="flows dapo and fapo: exclude truncated completions from the loss")


class PreferenceConfig(Section):
    """Loss on pairs of answers, in flows dpo and reward_model; [supervised] sets their steps."""

    loss: str = Field(
        "sigmoid", description="sigmoid (DPO), robust, hinge, ipo, simpo or a plugin's; reward_model: bradley_terry"
    )
    beta: Rate = Field(0.0, description="scale of the implicit reward; 0: the default of the loss (0.1, simpo 2)")
    smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="assumed share of wrong labels; 0: the default of the loss (0, robust 0.1)"
    )
    margin: float = Field(0.0, description="target margin of the chosen answer (gamma of simpo), added to the data's")
    average: bool = Field(False, description="sigmoid, robust, hinge: mean log-probs per token instead of sums")
    centring: Rate = Field(0.0, description="bradley_terry: weight of the squared sum of both scores, such as 0.01")
    sft: Rate = Field(0.0, description="weight of the likelihood of chosen answers (RPO)")

    @property
    def options(self) -> dict[str, Any]:
        """Options of the loss that differ from their defaults."""
        names = ("beta", "smoothing", "margin", "average", "centring")
        return {n: getattr(self, n) for n in names if getattr(self, n) != type(self).model_fields[n].default}


class RewardModelConfig(RoleSection):
    """Placement of the reward model in reward.model."""


class CommConfig(Section):
    """Messages of a step between ranks with the same parameters, and how far these learn apart."""

    gradients: Annotated[
        str, OneOf(lambda: ["exact", *COMPRESSORS], "compressor"), Fixed("what it left out waits for the next step")
    ] = Field("exact", description="how gradients travel: exact, or by a compressor, of a plugin too")
    weights: Annotated[Literal["exact", "difference4"], Fixed("what it left out waits for the next step")] = Field(
        "exact", description="with layout.zero = 1, how new weights travel; difference4: changes in 4 bits a value"
    )
    local: Annotated[str, OneOf(lambda: ["none", *LOCAL_METHODS]), Fixed("its data ranks have models of their own")] = (
        Field("none", description="how data ranks learn apart: cser, average, adaalter; none: they have one model")
    )
    every: Annotated[Positive, Fixed("its data ranks have models of their own")] = Field(
        1, description="local: steps from one sync of the models of all data ranks to the next"
    )
    feedback: bool = Field(
        True, description="add what the compressor leaves out of a gradient to the next one, if it declares a residual"
    )
    two_way: bool = Field(
        False,
        description="with dp: compress sums of gradients on their way back too, with a residual of their own",
    )
    smallest: Count = Field(
        65_536, description="elements of the smallest matrix that is compressed; norms and biases never are"
    )
    bucket_bytes: Positive = Field(
        1 << 25, description="bytes of gradients that travel together, as soon as the last backward pass has left them"
    )
    node_size: Positive = Field(
        1,
        description="sdp4bit: neighbouring data ranks with fast links, on which gradients have 8 bits a value",
    )
    options: Options = Field({}, description="keyword arguments of the compressor, or of the local method")

    @property
    def exact(self) -> bool:
        """True if nothing is compressed, and ranks learn together."""
        return self.gradients == self.weights == "exact" and self.local == "none"

    @property
    def residual(self) -> bool:
        """True if what is left out of a gradient is added to the next one."""
        return self.gradients != "exact" and self.feedback and "residual" in COMPRESSORS[self.gradients].state


class PolicyConfig(RoleSection):
    """Placement of the trained model, and comparison with the rollout engine's copy."""

    comm: CommConfig = Field(CommConfig(), description="how its ranks send gradients to each other")

    lora: Adapters = Field(LoraConfig(), description="adapters that are learned instead of the weights")
    probe_every: Count = Field(
        25, description="weight syncs between two comparisons of log-probs on a probe batch; 0: checksums only"
    )


class TeacherConfig(Section):
    """One of several teachers of flow distill, which the samples of its sources follow."""

    path: str = Field("", description="run or Hugging Face directory of the teacher")
    sources: tuple[str, ...] = Field(
        (), description="names of sources of data.mixture, or values of reference.field, whose prompts follow it"
    )
    align: Literal["auto", "tokens", "characters"] = Field(
        "auto",
        description="what is compared: tokens, of a teacher that has the policy's, or characters; auto: as "
        "algorithm.options.align, which must be characters if a teacher's is",
    )


class ReferenceConfig(RoleSection):
    """Model of the KL penalty, or teachers of flow distill."""

    path: Annotated[str, Fixed("the KL penalty is towards this model")] = Field(
        "", description="run or Hugging Face directory with the same tokens; empty: the policy at the phase's start"
    )
    teachers: Annotated[dict[str, TeacherConfig], Fixed("its samples follow these models")] = Field(
        {}, description="flow distill: [several teachers](#teachers) by name, in place of reference.path"
    )
    field: Annotated[str, Fixed("it says which teacher a sample follows")] = Field(
        "",
        description="column of a record, or a path such as meta.kind, whose value names its teacher's source; empty: "
        "its source in data.mixture",
    )


class JudgeConfig(RoleSection):
    """Frozen model that grades answers by a rubric, or names the first wrong step of a right answer (flow fapo)."""

    path: str = Field("", description="run or Hugging Face directory of the judge, such as a run of flaws-judge")
    penalty: Penalty = Field(
        1.0, description="FAPO's lambda: a right answer with a wrong step loses half of it; 0: only measure"
    )
    max_tokens: Positive = Field(256, description="maximum tokens of a verdict, with the reasoning before it")
    rubric: str = Field(
        "",
        description="question to the judge about every answer, with {completion}, {prompt} and {answer} in it; the "
        "number after the last Score: or # of its reply is added to the reward, else that is missing; empty: none",
    )


class CriticConfig(RoleSection):
    """Value model: a copy of the policy with a value head, which gives a value per token."""

    lr: Rate = Field(1e-3, description="peak learning rate of the critic")
    steps: Count = Field(0, description="steps that train the critic alone before those of the policy")
    clip: Rate = Field(0.2, description="clip range of values in an update; 0: no clip")
    lora: Adapters = Field(LoraConfig(), description="adapters that are learned instead of the body's weights")


class BroughtRole(RoleSection):
    """Placement of a plugin's role, and its options."""

    path: str = Field("", description="model to load: a run or Hugging Face directory")
    options: Options = Field({}, description="keyword arguments of its class")


class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule."""

    name: Annotated[str, OneOf(lambda: OPTIMIZERS, "optimizer"), Fixed("its optimizer's state is of this kind")] = (
        Field(
            "adamw",
            description="muon: block matrices by Muon, the rest by AdamW; lans, lamb, lars: large batches; adaalter: "
            "AdaGrad; or a plugin's",
        )
    )
    lr: Rate = Field(1e-4, description="peak learning rate")
    muon_lr_ratio: Rate = Field(10.0, description="muon: learning rate of block matrices divided by lr")
    muon_momentum: float = Field(
        0.95, ge=0, lt=1, description="muon: of its gradients; less of it suits samples of earlier versions"
    )
    muon_precision: Literal["fp32", "bf16"] = Field("fp32", description="muon: dtype of its orthogonalisation")
    betas: tuple[Share, Share] = Field((0.9, 0.95), description="decay rates of both moments; lars: of its momentum")
    weight_decay: Rate = Field(0.0, description="weight decay of matrices")
    schedule: Literal["constant", "linear", "cosine", "wsd", "plateau"] = Field(
        "constant",
        description="learning rate over steps (wsd decays in the last fifth; plateau holds the peak for plateau_steps "
        "after the warm-up, and decays linearly)",
    )
    plateau_steps: Count = Field(0, description="plateau: steps at the peak after the warm-up")
    ramp_steps: Count = Field(
        0,
        description='guard.batch = "scale": steps in which the learning rate rises to that of a larger batch',
    )
    warmup_steps: Count = Field(0, description="steps of linear warm-up to the peak")
    clip_norm: Rate = Field(1.0, description="maximum global gradient norm; 0: no clipping")


class TrainConfig(Section):
    """Device, precision and memory of training."""

    device: str = Field("auto", description="auto, cpu, cuda or cuda:N; auto: cuda if available")
    precision: Precision = Field("fp32", description="dtype of activations in trainer and engine; parameters are fp32")
    matmul: Literal["highest", "high", "medium"] = Field(
        "highest", description="torch's fp32 matmul precision (medium is bf16 on a CPU with AMX)"
    )
    threads: Count = Field(0, description="CPU threads; 0: the physical cores")
    parity: bool = Field(False, description="trainer and engine agree bit for bit (CPU, eager)")
    micro_tokens: Positive = Field(16_384, description="maximum tokens in one forward and backward pass")
    balance: Literal["tokens", "cost", "none"] = Field(
        "tokens",
        description="what is even over the ranks that divide the rows of a batch: tokens; cost: predicted seconds, at "
        "first by a profile of the model, after 50 steps by the run itself; none: numbers of rows",
    )
    checkpointing: Literal[False, True, "selective"] = Field(
        False,
        description="recompute each layer's activations in the backward pass; selective: all but the outputs of matrix "
        "products and attention",
    )
    offload: Literal["auto"] | Share = Field(
        0.0,
        description="on a GPU: share of the rows of the layers' activations that moves to host memory until the "
        "backward pass; auto: of a sequence longer than micro_tokens, what exceeds the memory of that many tokens",
    )
    compile: Literal[False, True, "auto"] = Field(
        False,
        description="torch.compile the training forward and backward; auto: if the run's steps save more than it takes",
    )
    routing: Literal["own", "compare", "replay"] = Field(
        "compare",
        description="experts of the policy's tokens: its router's own choice; compare: and count how many differ from "
        "those that the engine records; replay: follow the engine's",
    )
    router_balance: Rate = Field(
        0.0, description="weight of the loss that balances experts over the whole batch, 1 if they are even; 0: none"
    )
    router_z: Rate = Field(0.0, description="weight of the squared log-sum-exp of router logits; 0: none")
    router_correction: Rate = Field(
        0.0,
        description="families with a router bias: its step after each update, up where an expert has less than the "
        "mean load; 0: none",
    )
    ema: Annotated[Share, Fixed("its average of the weights began with it")] = Field(
        0.0, description="decay of an exponential moving average of the weights, RUN@ema; 0: none"
    )
    watch: tuple[Literal["noise_scale", "layer_norms"], ...] = Field(
        (), description="further metrics: gradient noise scale; norms of each layer's weights and gradients"
    )
    mismatch: Rate = Field(
        0.0,
        description="maximum log-prob difference of trainer and engine; 0: 1e-3 in fp32, 0.5 in bf16, 2 if corrected",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_earlier_key(cls, data: Any) -> Any:
        """Read ``offload_activations``, true or false in recipes of earlier versions, as ``offload``."""
        before = data.get("offload_activations") if isinstance(data, Mapping) else None
        if not isinstance(before, bool) or (before and "offload" in data):
            return data
        return {"offload": float(before)} | {name: data[name] for name in data if name != "offload_activations"}


class RunConfig(Section):
    """Folder of a run, evaluation, checkpoints and logging."""

    dir: Annotated[str, Fixed("it is the run's place")] = Field("runs", description="folder of runs")
    name: Annotated[str, Fixed("it is the run's place")] = Field(
        "", description="name of the run's folder; empty: the recipe's name and a number"
    )
    sweep: str = Field("", description="sweep that the run belongs to, as tilth sweep sets it; empty: none")
    eval_every: Count = Field(
        25, description="steps between two evaluations on held-out prompts; 0: first and last only"
    )
    eval_prompts: Positive = Field(512, description="held-out prompts in an evaluation")
    save_every: Positive = Field(25, description="steps between two checkpoints")
    save_minutes: Rate = Field(10.0, description="minutes after which a step ends with a checkpoint anyway; 0: never")
    save_background: bool = Field(True, description="train on while a copy in host memory is written")
    save_failures: Count = Field(
        0, description="due checkpoints in a row that may fail before the run stops; 0: any number, with new tries"
    )
    grace: float = Field(
        60.0, gt=0, description="seconds after SIGTERM or SIGHUP for a last checkpoint, then the run ends anyway"
    )
    checkpoints: Annotated[str, Fixed("its checkpoints are there")] = Field(
        "", description="place of checkpoints: a folder or a store's URL (s3://bucket/path); empty: the run's folder"
    )
    keep: Positive = Field(2, description="newest checkpoints to keep, besides the best by evaluation (RUN@best)")
    keep_every: Count = Field(0, description="keep checkpoints of every multiple of this step too; 0: none")
    collect_every: Count = Field(
        0, description="steps between two garbage collections of Python on all ranks at once; 0: left to Python"
    )
    track: tuple[Annotated[str, OneOf(lambda: (*TRACKERS, *declared("tracker")), "tracker")], ...] = Field(
        (), description="trackers that log every metric too (wandb: offline unless WANDB_MODE is set)"
    )
    prometheus: int = Field(
        0, ge=0, le=65535, description="port of 127.0.0.1 that serves the newest metrics to Prometheus; 0: none"
    )
    profile: str = Field(
        "", description="steps A:B, without B, that torch's profiler records into RUN/profiles; empty: none"
    )
    profile_ranks: tuple[int, ...] = Field((0,), description="ranks to profile")


class ClusterConfig(Section):
    """Worker processes and their pools."""

    backend: Annotated[
        str,
        OneOf(lambda: [*BACKENDS, *declared("backend")], "backend"),
        Fixed("its state is in the memory of these workers"),
    ] = Field(
        "inline",
        description="inline: this process; local: processes of this machine; ray: actors on any number of machines; "
        "or a plugin's",
    )
    workers: Positive = Field(1, description="worker processes; with pools: their sum, which may be left out")
    pools: dict[str, Positive] = Field(
        {}, description="workers per pool, as in {train = 2, rollout = 2}; empty: one pool"
    )
    timeout: float = Field(600.0, gt=0, description="limit of one call in seconds, after which the run stops")
    address: Annotated[str, Fixed("its workers are there")] = Field(
        "", description="address of the Ray cluster to join; empty: start one on this machine"
    )
    costs: str = Field(
        "",
        description="costs that tilth trace costs --save has written, in place of a profile: implies train.balance = "
        "cost, and the mapping search takes them too",
    )
    search: Annotated[bool, Fixed("its layouts are found already")] = Field(
        False,
        description="search pools of the workers and layouts of the roles before the run, which records them; a layout "
        "that is set is kept",
    )


class GuardConfig(Section):
    """Failures of workers: how they are noticed, and how the run goes on after them (backends local and ray)."""

    restarts: Count = Field(
        8, description="recoveries within an hour, each from the last committed step; 0: the first failure ends the run"
    )
    spares: Count = Field(
        0,
        description="workers of the ray backend that have started and wait: one takes the place of a worker that is "
        "lost, or of one whose node is; a local worker is forked in a fraction of a second instead",
    )
    shrink: bool = Field(
        True,
        description="where a lost worker cannot be replaced: go on with fewer that divide the rows of a batch (dp, "
        "fsdp), so that sums of gradients differ in their last bits; false: the run ends",
    )
    hang_after: float = Field(
        120.0,
        ge=1,
        description="seconds without progress after which a worker in a call is taken to hang, and without a token "
        "after which the server of another engine is; longer than its longest operation",
    )
    batch: Literal["keep", "scale"] = Field(
        "keep",
        description="after a change of the number of workers: keep the batch of a step; or scale it and the learning "
        "rate, with optimizer.ramp_steps, and count progress and schedule in samples (supervised flows)",
    )
    on_nan: Literal["skip", "rollback", "stop"] = Field(
        "skip",
        description="for an optimizer step whose loss or gradient is not finite: skip it on all workers, and roll back "
        "after 3 in a row; rollback: go back to the newest checkpoint and leave out the data drawn since, twice at "
        "most; stop",
    )


class Teacher(NamedTuple):
    """One teacher of a run. name: empty for that of ``reference.path``; key: of its path; aligns: it may have another
    tokenizer."""

    name: str
    key: str
    path: str
    aligns: bool


def _chosen(value: Any) -> Any:
    """Return the keys of a section that were set, without defaults."""
    return {name: getattr(value, name) for name in value.model_fields_set} if isinstance(value, Section) else value


class Recipe(Section):
    """All keys of a run, in sections."""

    flow: Annotated[
        str, OneOf(lambda: FLOWS, "flow"), Fixed("the roles and what they have learned are those of its flow")
    ] = Field(
        "grpo",
        description="training loop: an algorithm of reinforcement learning, or [supervised] alone: sft on answers, "
        "pretrain on whole texts, dpo and reward_model on pairs of answers",
    )
    seed: Annotated[int, Fixed("its random numbers and the order of its data come from it")] = Field(
        0, ge=0, lt=2**63, description="seed of every random number of the run"
    )
    plugins: tuple[str, ...] = Field(
        (), description="user code, imported in every process: files ending in .py, or names of modules"
    )
    roles: dict[str, BroughtRole] = Field(
        {}, description="roles of plugins: a table of pool, layout, path and options for each (roles.NAME.pool)"
    )
    model: Annotated[ModelConfig, Fixed("its weights have this shape and began so")] = ModelConfig()
    data: Annotated[DataConfig, Fixed("its positions in the data would lead to others")] = DataConfig()
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
    guard: GuardConfig = GuardConfig()
    run: RunConfig = RunConfig()
    _told: tuple[str, ...] = PrivateAttr(())

    @property
    def told(self) -> tuple[str, ...]:
        """Lines on keys that nobody set, and that were made to fit the model or the data."""
        return self._told

    def telling(self, *lines: str) -> "Recipe":
        """Return a copy with further lines on such keys."""
        copy = self.model_copy()
        copy._told = (*self._told, *lines)
        return copy

    @model_validator(mode="wrap")
    @classmethod
    def _record_chosen_keys(cls, data: Any, check: Callable[[Any], "Recipe"]) -> "Recipe":
        """Limit ``algorithm.model_fields_set`` to keys that a person chose: no defaults of a flow, and none at all if
        every key is set, as in the recipe of a run."""
        recipe = check(cls._add_flow_defaults(data))
        if isinstance(data, Mapping):
            chosen = set(_chosen(data.get("algorithm", {})))
            everything = chosen >= AlgorithmConfig.model_fields.keys()
            recipe.algorithm.model_fields_set.intersection_update(() if everything else chosen)
        return recipe

    @classmethod
    def _add_flow_defaults(cls, data: Any) -> Any:
        """Merge the data over the defaults of its flow, loss and estimator."""
        if not isinstance(data, Mapping) or data.get("flow", "grpo") not in FLOWS:
            return data
        algorithm = _chosen(data.get("algorithm", {}))
        own = own_defaults(data.get("flow", "grpo"), algorithm, _chosen(data.get("rollout", {})))
        chosen = {**own.get("algorithm", {}), **(algorithm if isinstance(algorithm, Mapping) else {})}
        if brought := shared_defaults(str(chosen.get("advantage", "")), str(chosen.get("loss", ""))):
            own = {**own, "algorithm": {**own.get("algorithm", {}), **brought}}
        given = {name: _chosen(value) if name in own else value for name, value in data.items()}
        return below(given, own) if all(isinstance(given.get(name, {}), Mapping) for name in own) else data

    @property
    def flow_spec(self) -> Flow:
        """Properties of its flow."""
        return FLOWS[self.flow]

    @property
    def balance(self) -> Literal["tokens", "cost", "none"]:
        """Amount that is even over ranks: ``train.balance``; costs from a file imply "cost"."""
        return "cost" if self.cluster.costs else self.train.balance

    @property
    def grades(self) -> bool:
        """True if a judge grades every answer."""
        return self.flow_spec.samples and bool(self.judge.rubric)

    @property
    def aligns(self) -> bool:
        """True if a teacher with another tokenizer is followed, over chunks of equal characters."""
        given = bool(self.reference.path or self.reference.teachers)
        return self.teaches and given and self.algorithm.options.get("align") == "characters"

    @property
    def scores(self) -> bool:
        """True if a reward model, a judge or an environment scores answers, with or without a reward function."""
        return bool(self.reward.model or self.grades or self.rollout.environment)

    @property
    def teaches(self) -> bool:
        """True if the reference is a teacher, whose log-probs of samples are learned from."""
        return self.flow_spec.reference and self.flow_spec.samples

    @property
    def teachers(self) -> list[Teacher]:
        """Models that samples follow, in the order of ``reference.teachers``; empty: this run has no teacher."""
        if self.reference.teachers:
            return [
                Teacher(name, f"reference.teachers.{name}.path", one.path, self.aligns and one.align != "tokens")
                for name, one in self.reference.teachers.items()
            ]
        path = self.reference.path
        return [Teacher("", "reference.path", path, self.aligns)] if self.teaches and path else []

    @property
    def refers(self) -> bool:
        """True if the run has a reference model."""
        if self.flow_spec.learns == "pairs":
            return self.flow_spec.reference and self.preference.loss not in REFERENCE_FREE
        return self.flow_spec.reference or bool(self.flow_spec.samples and self.algorithm.kl_coef)

    def section(self, name: str) -> Any:
        """Return a section by name; ``roles.NAME`` has the defaults if the recipe does not set it."""
        role = name.removeprefix("roles.")
        return getattr(self, name) if role == name else self.roles.get(role, BroughtRole())

    def replaced(self, name: str, **values: Any) -> "Recipe":
        """Return a copy with other values in one section."""
        section, role = self.section(name).model_copy(update=values), name.removeprefix("roles.")
        return self.model_copy(update={name: section} if role == name else {"roles": {**self.roles, role: section}})

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Restore a pickled recipe and import its plugins."""
        super().__setstate__(state)
        load_plugins(self.plugins)

    def dump(self) -> dict[str, Any]:
        """Return all keys as plain nested dictionaries."""
        return self.model_dump(mode="json")
