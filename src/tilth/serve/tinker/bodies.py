"""Bodies of requests that travel as JSON, with the fields of the SDK's version 0.38. An unknown field is refused."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from tilth.serve.schemas import INT64, TokenId, TokenIds

INT32 = 2**31
Number = Annotated[int, Field(ge=0, lt=INT32)]
"""Number of a model or a sampler in its session."""
Place = Annotated[int, Field(ge=1, lt=INT32)]
"""Place of a request among those of a model, int32 in Protocol Buffers."""
Lifetime = Annotated[int, Field(gt=0, lt=INT32)]
"""Seconds, of which a time can be made."""


class ClientBody(BaseModel):
    """A body without unknown fields. type: a constant that the SDK sends along."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    type: str = ""


class SessionBody(ClientBody):
    """POST create_session."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str
    project_id: str | None = None
    display_name: str | None = None


class ClientLora(ClientBody):
    """Adapters as a client asks for them."""

    rank: int = Field(ge=0, le=1024)
    seed: int | None = Field(None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerKind(BaseModel):
    """Kind of optimizer of a model."""

    model_config = ConfigDict(extra="allow")
    type: str = "adamw"


class CreateBody(ClientBody):
    """POST create_model. lora_config: None or rank 0: weights of its own."""

    session_id: str
    model_seq_id: Number
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: ClientLora | None = None
    optimizer_config: OptimizerKind = OptimizerKind()


class LoadBody(ClientBody):
    """POST load_weights: into a model, or into a new one of a session."""

    model_id: str | None = None
    seq_id: Place | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerKind | None = None
    weights_access_token: str | None = None


class AdamBody(ClientBody):
    """Constants of AdamW; defaults are the SDK's."""

    learning_rate: FiniteFloat = Field(1e-4, ge=0)
    beta1: FiniteFloat = Field(0.9, ge=0, lt=1)
    beta2: FiniteFloat = Field(0.95, ge=0, lt=1)
    eps: FiniteFloat = Field(1e-12, ge=0)
    weight_decay: FiniteFloat = Field(0.0, ge=0)
    grad_clip_norm: FiniteFloat = Field(0.0, ge=0)


class StepBody(ClientBody):
    """POST optim_step."""

    model_id: str
    seq_id: Place
    adam_params: AdamBody | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveBody(ClientBody):
    """POST save_weights, save_weights_for_sampler and save_weights_external. path: the checkpoint's name."""

    model_id: str
    seq_id: Place
    path: str | None = None
    ttl_seconds: Lifetime | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    age_encryption_recipients: list[str] | None = None


class SamplingSessionBody(ClientBody):
    """POST create_sampling_session: of a checkpoint or of the base."""

    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class TextChunk(ClientBody):
    """Tokens of a prompt."""

    tokens: TokenIds


class PromptBody(ClientBody):
    """Prompt in chunks."""

    chunks: list[TextChunk]

    @property
    def tokens(self) -> list[int]:
        """All tokens."""
        return [token for chunk in self.chunks for token in chunk.tokens]


class ParamsBody(ClientBody):
    """Sampling parameters."""

    max_tokens: int | None = Field(None, gt=0, lt=INT64)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stop: str | Annotated[list[str] | list[TokenId], Field(max_length=64)] | None = None
    temperature: FiniteFloat = Field(1.0, ge=0)
    top_k: int = Field(-1, ge=-1, lt=INT64)
    top_p: FiniteFloat = Field(1.0, gt=0, le=1)


class TargetsBody(ClientBody):
    """Tokens whose log-probs are asked for, [prompt - 1, K]; -1: none."""

    data: list[Annotated[int, Field(ge=-1, lt=INT64)]]
    dtype: Literal["int64"]
    shape: list[Number] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SampleBody(ClientBody):
    """POST asample."""

    sampling_session_id: str
    seq_id: int = Field(ge=0, lt=INT64)
    num_samples: int = Field(1, ge=1, le=512)
    prompt: PromptBody
    sampling_params: ParamsBody
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=1024)
    topk_sample_logprobs: int = Field(0, ge=0, le=1024)
    target_prompt_logprobs: TargetsBody | None = None
    prompt_alt_tokens_k: int = Field(0, ge=0)
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    record_stability_info: bool | None = None


class RetrieveBody(ClientBody):
    """POST retrieve_future."""

    request_id: str
    allow_metadata_only: bool = False


class NamedBody(ClientBody):
    """A body with one name: of a session, a model, a sampler or a request."""

    session_id: str = ""
    model_id: str = ""
    sampling_session_id: str = ""
    request_id: str = ""
    tinker_path: str = ""


class FinishBody(ClientBody):
    """POST sessions/ID/finish."""

    reason: dict[str, Any] = {}
    detail: str | None = None


class LifetimeBody(ClientBody):
    """PUT checkpoints/ID/ttl; None: for ever."""

    ttl_seconds: Lifetime | None = None
