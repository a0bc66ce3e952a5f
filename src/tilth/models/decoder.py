"""Decoder of all families, with the layers and parameters that each declares: single-device code.

Tokens are flat [N]; attention goes through a context object. Parameters are cast to the compute dtype at use, so that
fp32 parameters (trainer) and parameters stored in the compute dtype (engine) do the same arithmetic. No autocast.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from inspect import signature
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilth.core.errors import ModelError
from tilth.core.layout import Box, Shape
from tilth.core.random import fill_normal_, stream
from tilth.models import fused
from tilth.models.activations import HostActivations, resident, run_layer
from tilth.models.attention import AttentionContext, CacheSlots, DropoutContext
from tilth.models.casts import cast
from tilth.models.config import DecoderConfig, check
from tilth.models.family import encoder_of, family_of
from tilth.models.inputs import EncoderInput, ModelInput
from tilth.models.kernels import chosen
from tilth.models.logprobs import head_logits, token_logprobs, token_squares, wide
from tilth.models.lora import Adapter, LinearChange
from tilth.models.moe import ExpertContext, MoE
from tilth.models.rope import Rope, Tables, along_one_axis, rotate, tables_of
from tilth.models.steady import elementwise, joined_linear, linear, steady
from tilth.plan.rules import rule_of
from tilth.plan.shape import parameter_shapes

Parts = tuple[Callable[..., tuple[Tensor, Tensor, Tensor]], Callable[..., Tensor]]


class Linear(nn.Module):
    """Weight [out, in] and optional bias, cast to the input's dtype at use.

    product: ``linear``, which a layout that computes gradients of weights apart replaces. lora: a low-rank change of
    the weight (``models.lora``).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    lora: LinearChange | None

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        self.lora = None
        self.product: Callable[..., Tensor] = linear

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, in] -> [N, out]."""
        return project(self, x, self.bias)


def project(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [N, in] through the weight of a linear layer, with the change by its adapter: [N, out]."""
    if layer.lora is None:
        found: Tensor = layer.product(x, layer.weight, bias)
        return found
    changed: Tensor = layer.lora.changed(layer.product, x, layer.weight, bias)
    return changed


class RMSNorm(nn.Module):
    """RMSNorm (arXiv 1910.07467): x / rms(x) in fp32, rounded to x's dtype, times weight, as in transformers."""

    weight: nn.Parameter

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.register_parameter("weight", None)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        if x.dtype == torch.float32 and self.weight.dtype == torch.float32:
            if fused.serves(x) and fused.norms(x.shape[-1], self.eps):
                return fused.norm(x, self.weight, self.eps)
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, None, self.eps) * cast(self.weight, x.dtype)


class WideRMSNorm(RMSNorm):
    """RMSNorm whose product with the weight is in fp32 too, rounded to x's dtype once."""

    offset = 0.0
    """Added to the weight."""

    def forward(self, x: Tensor) -> Tensor:
        kind = wide(x.dtype)
        weight = self.weight.to(x.dtype).to(kind)  # as an engine holds it
        weight = weight + self.offset if self.offset else weight
        return F.rms_norm(x.to(kind), weight.shape, weight, self.eps).to(x.dtype)


def norm_of(config: DecoderConfig) -> RMSNorm:
    """Return a norm of the config's family, without parameters."""
    return (family_of(config.family).norm or RMSNorm)(config.rms_norm_eps)


class Embedding(nn.Module):
    """Table [V, width] indexed by token id."""

    weight: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("weight", None)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: int64 [N] -> [N, width]."""
        return F.embedding(ids, self.weight)


def _joined(parts: list[Linear]) -> tuple[Tensor, Tensor | None]:
    """Concatenate weights (and biases) of ``parts`` along the output; their parameters become views of the result."""
    weight = torch.cat([p.weight.data for p in parts])
    biases = [p.bias for p in parts if p.bias is not None]
    bias = torch.cat([b.data for b in biases]) if biases else None
    sizes = [p.weight.shape[0] for p in parts]
    for part, rows in zip(parts, weight.split(sizes)):
        part.weight.data = rows
    for own, rows in zip(biases, bias.split(sizes) if bias is not None else ()):
        own.data = rows
    return weight, bias


def _product_of(parts: Sequence[Linear], joined: tuple[Tensor, Tensor | None], x: Tensor) -> Tensor:
    """Return x [N, in] through joined layers, with the changes of each: [N, out of all]."""
    sizes = [part.weight.shape[0] for part in parts]
    found = joined_linear(x, *joined, sizes)
    if any(part.lora is not None for part in parts):
        for part, own in zip(parts, found.split(sizes, 1)):
            if part.lora is not None:
                part.lora.add_(own, x)
    return found


class Attention(nn.Module):
    """Projections, rotary embedding and (Qwen3) norms of queries and keys; the context computes attention.

    ``sinks`` [heads], in families whose table has them, take part in the softmax of every query.
    """

    sinks: nn.Parameter | None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.register_parameter("sinks", None)
        self.head_dim, self.wide_norm = config.head_dim, config.wide_qk_norm
        self.scale = (config.head_dim / config.query_scalar) ** 0.5
        """Factor of queries beside head_dim**-0.5, which every attention context applies."""
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = Linear(), Linear(), Linear(), Linear()
        self.q_norm = norm_of(config) if config.qk_norm else None
        self.k_norm = norm_of(config) if config.qk_norm else None
        self.joined: tuple[Tensor, Tensor | None] | None = None

    def forward(self, x: Tensor, tables: Tables, into: CacheSlots | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys (normed and rotated) and values, [N, heads, head_dim] each; for keys and values those
        of ``into``, if a kernel has written them there."""
        rows, hd = x.shape[0], self.head_dim
        heads, kv_heads = (part.weight.shape[0] // hd for part in (self.q_proj, self.k_proj))  # perhaps one rank's
        if self.joined is not None and not torch.is_grad_enabled():
            every = _product_of([self.q_proj, self.k_proj, self.v_proj], self.joined, x)
            by = None if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight)
            eps = 0.0 if self.q_norm is None else self.q_norm.eps
            if into is not None and self._plain(tables) and (kernel := chosen("rope_cache", every)):
                return kernel.write(every, by, eps, tables, *into), into.keys, into.values
            if self._fuses(every, tables):
                q, k = fused.heads(every, by, tables, (heads, kv_heads, hd), eps)
                return q, k, every[:, (heads + kv_heads) * hd :].view(rows, kv_heads, hd)
            every = every.view(rows, heads + 2 * kv_heads, hd)
            both, v = every.split((heads + kv_heads, kv_heads), 1)
            if self.q_norm is None and self.scale == 1:
                q, k = rotate(both, *tables).split((heads, kv_heads), 1)
                return q, k, v
            q, k = both.split((heads, kv_heads), 1)
        else:
            q = self.q_proj(x).view(rows, heads, hd)
            k, v = (project(x).view(rows, kv_heads, hd) for project in (self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normed(self.q_norm, q), self._normed(self.k_norm, k)
        q = q if self.scale == 1 else q * self.scale
        return rotate(q, *tables), rotate(k, *tables), v

    def _plain(self, tables: Tables) -> bool:
        """Return True if nothing but norms of heads and the rotation of all of their width is between products and
        attention."""
        normed = self.q_norm is None or (type(self.q_norm) is RMSNorm and not self.wide_norm)
        return self.scale == 1 and normed and tables[0].shape[-1] == self.head_dim

    def _fuses(self, x: Tensor, tables: Tables) -> bool:
        """Return True if one pass norms and rotates the heads of a joined product."""
        norm, width = self.q_norm, self.head_dim
        plain = self._plain(tables) and fused.serves(x)
        return plain and (norm is None or fused.norms(width, norm.eps)) and fused.rotates(width)

    def _normed(self, norm: RMSNorm, heads: Tensor) -> Tensor:
        return norm(heads.flatten(1)).view(heads.shape) if self.wide_norm else norm(heads)

    def fuse(self) -> None:
        """Use one matmul for queries, keys and values in inference."""
        self.joined = _joined([self.q_proj, self.k_proj, self.v_proj])


def activate(name: str, x: Tensor) -> Tensor:
    """Apply an activation function by its name in transformers. Raises ModelError if it is not known."""
    if name == "silu":
        return elementwise(F.silu, x)
    if name == "gelu_pytorch_tanh":
        return elementwise(partial(F.gelu, approximate="tanh"), x)
    raise ModelError(f"activation {name!r} is unknown to models.decoder.MLP; give the layer its own", key="activation")


class MLP(nn.Module):
    """SwiGLU, or GeGLU: down(act(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, activation: str = "silu") -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj, self.up_proj, self.down_proj = Linear(), Linear(), Linear()
        self.joined: tuple[Tensor, Tensor | None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, hidden] -> [N, hidden]."""
        if torch.is_grad_enabled():
            return self.down_proj(activate(self.activation, self.gate_proj(x)) * self.up_proj(x))
        if self.joined is None:
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = _product_of([self.gate_proj, self.up_proj], self.joined, x).chunk(2, -1)
        if self.activation == "silu" and fused.serves(gate) and (exponential := fused.exponential_of()):
            return self.down_proj(fused.gated(gate, up, exponential))
        return self.down_proj(activate(self.activation, gate).mul_(up))

    def fuse(self) -> None:
        """Use one matmul for gate and up in inference."""
        self.joined = _joined([self.gate_proj, self.up_proj])


def _block(config: DecoderConfig, layer: int) -> nn.Module:
    """Return the MLP of a layer, or its experts."""
    activation = family_of(config.family).activation
    if layer not in config.expert_layers:
        return MLP(activation)
    return MoE(config, layer, MLP(activation) if config.shared_experts else None)


class Layer(nn.Module):
    """Pre-norm residual block. The context's attention separates two parts that compile."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.window, self.dropout = layer, config.window(layer), config.dropout
        self.self_attn = Attention(config)
        self.mlp: nn.Module = _block(config, layer)
        self.input_layernorm, self.post_attention_layernorm = norm_of(config), norm_of(config)
        self.parts: Parts = (type(self).enter, type(self).leave)
        self.dropping: tuple[Adapter, ...] = ()
        """Adapters with dropout; their random numbers are those of the pass, also where it is computed again."""

    def forward(self, x: Tensor, tables: Tables, ctx: AttentionContext) -> Tensor:
        """x: [N, hidden] -> [N, hidden]."""
        if ctx.experts is not None and ctx.experts.parity:
            with steady():
                return self._forward(x, tables, ctx)
        return self._forward(x, tables, ctx)

    def _forward(self, x: Tensor, tables: Tables, ctx: AttentionContext) -> Tensor:
        for adapter in self.dropping:
            adapter.drop = ctx.dropout.apply_columns if ctx.dropout is not None and self.training else None
        enter, leave = self.parts
        own = tables_of(tables, self.window is not None)
        sinks = () if self.self_attn.sinks is None else (self.self_attn.sinks,)
        slots = getattr(ctx, "slots", None)  # a cache to which a kernel may write
        into = (slots(self.layer),) if slots is not None and self.writes else ()
        mixed = ctx.attend(self.layer, *enter(self, x, own, *into), self.window, *sinks)
        routed = (ctx.experts,) if isinstance(self.mlp, MoE) else ()
        return leave(self, x, mixed, ctx.dropout if self.dropout and self.training else None, *routed)

    @cached_property
    def writes(self) -> bool:
        """True if a kernel may write keys and values to the cache: ``enter``, and attention, take ``into`` behind the
        tables. A layer of a plugin may have an ``enter`` of its own that does not."""
        return all("into" in [*signature(f).parameters][3:4] for f in (type(self).enter, type(self.self_attn).forward))

    def enter(self, x: Tensor, tables: Tables, *into: CacheSlots) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of attention: q, k, v [N, heads, head_dim]. into: see ``Attention``."""
        return self.self_attn(self.input_layernorm(x), tables, *into)

    def leave(self, x: Tensor, mixed: Tensor, dropout: DropoutContext | None, *routed: ExpertContext | None) -> Tensor:
        """Return the layer's output, given attention's result [N, heads, head_dim].

        routed: the context of experts, for a layer that has them.
        """
        x = x + self._drop(self.self_attn.o_proj(mixed.flatten(1)), dropout, "attention")
        return x + self._drop(self.mlp(self.post_attention_layernorm(x), *routed), dropout, "mlp")

    def _drop(self, x: Tensor, dropout: DropoutContext | None, branch: str) -> Tensor:
        return x if dropout is None else dropout.apply(x, self.dropout, self.layer, branch)


class Stack(nn.Module):
    """Embedding, layers and final norm (``model`` in checkpoints)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding()
        layer = family_of(config.family).layer or Layer
        self.layers = nn.ModuleList(layer(config, i) for i in range(config.num_layers))
        self.norm = norm_of(config)


def drops(model: "Decoder") -> bool:
    """True if a decoder has dropout in passes that learn: on its branches, or of adapters."""
    return bool(model.config.dropout) or any(getattr(module, "dropping", ()) for module in model.modules())


def not_finite(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Describe the parameters that hold a NaN or an infinity: the first name and a count; "" if none does."""
    names = [name for name, p in parameters if not torch.isfinite(p).all()]
    return " and ".join(names[:1] + [f"{len(names) - 1} more"] * (len(names) > 1))


class Decoder(nn.Module):
    """A causal language model. Parameters are fp32 and uninitialised until ``init_weights_`` or ``load_state_dict``.

    The family's ``table`` gives modules their parameters. Raises ModelError where table and modules differ.

    dtype: compute dtype of the residual stream. ``checkpointing``: recompute each layer in the backward pass, or a part
    of it (``models.activations``). ``offload``: moves a share of the activations to the host.
    ``head_logits``, ``token_logprobs`` and ``token_squares``: functions of the output head (``models.logprobs``),
    which a layout that splits the vocabulary replaces. ``first``, ``last``: it begins with the embedding and ends with
    the norm; False of a part of a model, which passes on hidden states instead (``parallel.pipeline``).
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.dtype, self._fused = config, dtype, False
        self.checkpointing: bool | str = False
        self.offload: HostActivations | None = None
        self.first = self.last = True
        self.head_logits: Callable[[Tensor, Tensor], Tensor] = head_logits
        self.token_logprobs: Callable[..., tuple[Tensor, Tensor]] = token_logprobs
        self.token_squares: Callable[..., tuple[Tensor, Tensor]] = token_squares
        scale = config.hidden_size**0.5 if config.scale_embeddings else 1.0
        self.embedding_scale = torch.tensor(scale, dtype=dtype, device="cpu").item()  # rounded, as in transformers
        self.model = Stack(config)
        self.lm_head = None if config.tie_embeddings else Linear()
        names = family_of(config.family).encoders
        self.encoders = nn.ModuleDict({name: encoder_of(name).module(config) for name in names})
        self.rope = Rope(config)
        self.table = config.table
        self._allocate()

    def _allocate(self) -> None:
        """Create the parameters of the table in the modules. Raises ModelError where one side lacks the other."""
        modules = dict(self.named_modules())
        for name, sizes in parameter_shapes(self.config).items():
            path, _, leaf = name.rpartition(".")
            own = getattr(modules.get(path), leaf, ())
            if own is None:
                setattr(modules[path], leaf, nn.Parameter(torch.empty(sizes)))
            elif not isinstance(own, nn.Parameter) or own.shape != sizes:
                message = f"family {self.config.family}: its table has {name} {list(sizes)}, its modules do not"
                raise ModelError(message, key=f"{name}.module")
        for name, _ in self.named_parameters():
            rule_of(self.table, name)
        empty = [name for name, module in modules.items() if getattr(module, "weight", ()) is None]
        if empty:
            name = f"{empty[0]}.weight"
            message = f"family {self.config.family}: its table has no {name}, its modules do"
            raise ModelError(message, key=f"{name}.rule")

    @property
    def head_weight(self) -> nn.Parameter:
        """Weight of the output head [V, hidden], the embedding's if tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, given: ModelInput | Tensor, ctx: AttentionContext) -> Tensor:
        """Return hidden states [N, hidden] of the input after the final norm, in the compute dtype.

        given: ids alone, int64 [N], are those of texts. If ``ctx.positions`` is longer than ids (parity), rows of token
        0 are padded and dropped at the end. A part that is not the first takes hidden states instead of ids; one that
        is not the last returns them before the norm.
        """
        given = given if isinstance(given, ModelInput) else ModelInput(given)
        ids, places = given.ids, ctx.positions
        n, rows = ids.shape[0], places.shape[0]
        x = self.embed(ids if rows == n else F.pad(ids, (0, rows - n))) if self.first else ids
        if self.first and (given.media or self.encoders):
            x = self._with_media(x, given.media, ctx.experts is not None and ctx.experts.parity)
        if given.positions is not None:
            places = F.pad(along_one_axis(given.positions, n), (0, rows - n))
        tables = self.rope.tables(places, getattr(ctx, "extents", None), self.dtype)
        moving = resident if self.offload is None else self.offload.begin(rows, len(self.model.layers))
        for number, layer in enumerate(self.model.layers):
            with moving(number):
                x = run_layer(layer, self.checkpointing, x, tables, ctx)
        if not self.last:
            return x
        x = self.model.norm(x)
        return x if rows == n or not self.first else x[:n]

    def embed(self, ids: Tensor) -> Tensor:
        """Return embeddings [N, hidden] of ids int64 [N] in the compute dtype, scaled if the family scales them."""
        x = self.model.embed_tokens(ids).to(self.dtype)
        return x if self.embedding_scale == 1 else x * self.embedding_scale

    def _with_media(self, x: Tensor, media: Sequence[EncoderInput], parity: bool) -> Tensor:
        """Return embeddings [rows, hidden] with those of media in their places. Raises ModelError."""
        for one in media:
            known = f"one of family {self.config.family}, which has {', '.join(self.encoders) or 'none'}"
            check(one.encoder in self.encoders, "media.encoder", one.encoder, known)
            with steady() if parity else nullcontext():
                found = self.encoders[one.encoder](one.items, one.counts, self.dtype)
            right, given = [len(one.places), x.shape[1]], list(found.shape)
            check(given == right, f"encoders.{one.encoder}", given, f"{right} for items of {one.counts} positions")
            inside = one.places >= 0
            x = x.index_copy(0, one.places[inside], found[inside])
        if torch.is_grad_enabled():  # encoders without an item have a gradient, as on ranks and in steps that have some
            x = x + sum(p.flatten()[:0].sum() for p in self.encoders.parameters())
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits float32 [N, V] (float64 of float64) of hidden [N, hidden]."""
        return self.head_logits(hidden, self.head_weight)

    def fuse(self) -> None:
        """Put q, k, v (and gate, up) of each layer into one storage, for one matmul in inference: decoding is 2 to 15 %
        faster, with equal bits (for rows padded as in parity mode). Latent attention then attends to latents.

        Parameters keep their names and become views, so ``copy_`` and checksums work. Moving the module to another
        dtype or device, copying it, or ``load_state_dict(assign=True)`` fuses it again.
        """
        self._fused = True
        for module in self.model.modules():
            fuse = getattr(module, "fuse", None)
            if callable(fuse):
                fuse()

    def compile(self, **options: Any) -> None:
        """``torch.compile`` the two parts around attention, one pair of graphs for all layers.

        The context stays eager: its shapes follow the lengths of the sequences, so compiling it (as
        ``torch.compile(model)`` would) costs a graph for every new set of lengths. options: of torch.compile.
        """
        for module in self.modules():
            if isinstance(module, MoE):  # shapes of its loop over experts follow the choice
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        layers = [layer for layer in self.modules() if isinstance(layer, Layer)]
        parts: dict[Any, Any] = dict.fromkeys(part for layer in layers for part in layer.parts)
        parts = {part: torch.compile(part, **{"dynamic": True, **options}) for part in parts}
        for layer in layers:
            layer.parts = parts[layer.parts[0]], parts[layer.parts[1]]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if self._fused:
            self.fuse()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._fused:
            self.fuse()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        keys = super().load_state_dict(state_dict, strict, assign)
        if self._fused and assign:
            self.fuse()
        return keys

    @torch.no_grad()
    def init_weights_(self, seed: int) -> None:
        """Fill every parameter from ``stream(seed, "init", name)``, so that no layout or order changes a bit.

        The table decides the distribution; a matrix that writes to the residual stream is scaled by 1 / sqrt(2 layers)
        (GPT-2), which keeps the stream's variance at initialisation independent of depth.
        """
        for name, parameter in self.named_parameters():
            self.init_parameter_(name, parameter.data, seed)

    def init_parameter_(
        self, name: str, piece: Tensor, seed: int, box: Box | None = None, shape: Shape | None = None
    ) -> None:
        """``init_weights_`` of one parameter, or of the piece ``box`` of it; shape: the whole parameter's."""
        init = rule_of(self.table, name).init
        if init in ("zeros", "ones"):
            piece.fill_(init == "ones")
        else:
            width = (shape or tuple(piece.shape))[-1]
            stds = {"residual": 0.02 / math.sqrt(2 * self.config.num_layers), "fan_in": 1 / math.sqrt(3 * width)}
            std = stds.get(init, 0.02)
            fill_normal_(piece, stream(seed, "init", name), std, box, shape)
