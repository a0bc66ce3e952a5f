"""Kernels that a GPU has and a CPU has not, each as one operation with the conditions of the real one."""

import sys
import types

import torch

from tests.gpu_free.device import DeviceTensor, fault


@torch.library.custom_op("pretended::attention", mutates_args=())
def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> torch.Tensor:
    return (_weights(q, k, mask, causal, scale) @ v.double()).to(q.dtype).contiguous()


@torch.library.custom_op("pretended::attention_backward", mutates_args=())
def _attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    p = _weights(q, k, mask, causal, scale)
    grad, q, k, v, kind = grad.double(), q.double(), k.double(), v.double(), q.dtype
    of_p = grad @ v.transpose(-1, -2)
    of_s = p * (of_p - (of_p * p).sum(-1, keepdim=True))
    found = of_s @ k * scale, of_s.transpose(-1, -2) @ q * scale, p.transpose(-1, -2) @ grad
    return tuple(x.to(kind).contiguous() for x in found)


def _weights(q, k, mask, causal, scale):
    scores = (q.double() @ k.double().transpose(-1, -2)) * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    return torch.softmax(scores, -1)


def _attention_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])
    ctx.mask, ctx.causal, ctx.scale = inputs[3:]


_attention.register_autograd(
    lambda ctx, grad: (*_attention_backward(grad, *ctx.saved_tensors, ctx.mask, ctx.causal, ctx.scale), *[None] * 3),
    setup_context=_attention_inputs,
)
_sdpa, _rms = torch.nn.functional.scaled_dot_product_attention, torch.nn.functional.rms_norm


@torch.library.custom_op("pretended::rms_norm", mutates_args=())
def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return _rms(x, x.shape[-1:], weight, eps).clone()


@torch.library.custom_op("pretended::rms_norm_backward", mutates_args=())
def _norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y, g = x.to(wide), grad.to(wide)
    scale = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    own = torch.zeros(x.shape[-1]) if weight is None else (g * y * scale).flatten(0, -2).sum(0).to(weight.dtype)
    g = g if weight is None else g * weight.to(wide)
    return (scale * g - y * scale.pow(3) * (g * y).mean(-1, keepdim=True)).to(x.dtype), own


def _norm_inputs(ctx, inputs, output):
    ctx.save_for_backward(*[x for x in inputs[:2] if x is not None])
    ctx.eps = inputs[2]


def _norm_grad(ctx, grad):
    x, *weight = ctx.saved_tensors
    found, own = _norm_backward(grad, x, weight[0] if weight else None, ctx.eps)
    return found, own if weight else None, None


_norm.register_autograd(_norm_grad, setup_context=_norm_inputs)


@torch.library.custom_op("pretended::choice", mutates_args=())
def _choice(
    logp: torch.Tensor, uniform: torch.Tensor, greedy: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
    min_p: torch.Tensor, filtered: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    from tilth.engines.sampling import Rules, choose_from

    flags = {"unit": False, "any_greedy": True, "all_greedy": False, "most": logp.shape[1], "nucleus": True}
    rules = Rules(torch.ones_like(top_p), greedy, top_k, top_p, min_p, filtered=filtered, **flags)
    found = choose_from(logp, None, uniform, rules)
    return found.tokens, torch.stack([found.logprobs, found.sampling if filtered else found.logprobs])


class Sampler:
    """Kernel of the sampler, in place of ``tilth.models.kernels.sampler``."""

    @staticmethod
    def choose(*given):
        tokens, picked = torch.ops.pretended.choice(*given)
        return tokens, picked[0], picked[1] if given[-1] else None


@torch.library.custom_op("pretended::rope_cache", mutates_args=("keys", "values"))
def _rope_cache(
    every: torch.Tensor, query_norm: torch.Tensor | None, key_norm: torch.Tensor | None, eps: float, cos: torch.Tensor,
    sin: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    from tilth.models.rope import rotate

    kv_heads, width = keys.shape[-2:]
    heads = every.shape[1] // width - 2 * kv_heads
    q, k, v = every.view(len(every), -1, width).split((heads, kv_heads, kv_heads), 1)
    if query_norm is not None:
        q, k = (_rms(x, (width,), None, eps) * weight for x, weight in ((q, query_norm), (k, key_norm)))
    for cached, new in ((keys, rotate(k, cos, sin)), (values, v)):
        cached.view(-1, kv_heads, width).index_copy_(0, slots, new[: len(slots)])
    return rotate(q, cos, sin)


class RopeCache:
    """Kernel of rotary embedding and cache, in place of ``tilth.models.kernels.rope_cache``."""

    @staticmethod
    def write(every, norms, eps, tables, keys, values, slots):
        given = (every, *(norms or (None, None)), eps, *tables, keys, values, slots)
        if any(isinstance(x, torch.Tensor) and not (isinstance(x, DeviceTensor) and x.is_contiguous()) for x in given):
            fault("rope and cache: operands that are not dense, or not on the device")
        return torch.ops.pretended.rope_cache(*given)


def rms_norm(x, shape, weight=None, eps=None):
    if not isinstance(x, DeviceTensor):
        return _rms(x, shape, weight, eps)
    if weight is not None and not isinstance(weight, DeviceTensor):
        fault("rms_norm: the weight is on the host")
    return torch.ops.pretended.rms_norm(x, weight, torch.finfo(x.dtype).eps if eps is None else eps)


def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if not isinstance(q, DeviceTensor):
        return _sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if any(x is not None and not isinstance(x, DeviceTensor) for x in (k, v, attn_mask)):
        fault("attention: operands on the device and on the host")
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, q.dtype):
        fault(f"attention: mask of {attn_mask.dtype} for {q.dtype}")
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.pretended.attention(q, k, v, attn_mask, is_causal, scale)


@torch.library.custom_op("pretended::paged_attention", mutates_args=())
def _paged_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, pages: torch.Tensor,
    lengths: torch.Tensor, left: int, causal: bool, scale: float,
) -> torch.Tensor:  # fmt: skip
    out, size, group = torch.empty_like(q), keys.shape[1], q.shape[1] // keys.shape[2]
    for row, (begin, end, length) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), lengths.tolist())):
        held = pages[row, : -(-length // size)].long()
        k, v = (x[held].flatten(0, 1)[:length].transpose(0, 1).repeat_interleave(group, 0) for x in (keys, values))
        behind = torch.arange(length - end + begin, length)[:, None] - torch.arange(length)
        seen = behind >= 0 if causal else torch.ones(behind.shape, dtype=torch.bool)
        seen = seen & (behind <= left) if left >= 0 else seen
        out[begin:end] = (_weights(q[begin:end].transpose(0, 1), k, seen, False, scale) @ v.double()).transpose(0, 1)
    return out


def paged_attention(q, k, v, ends, longest, window_size, scale, lengths, pages):
    if any(x.dtype != torch.int32 or not isinstance(x, DeviceTensor) for x in (*ends, lengths, pages)):
        fault("paged attention: lengths or pages are not int32 on the device")
    if pages.stride(-1) != 1 or not lengths.is_contiguous():
        fault("paged attention: lengths or pages are not dense")
    if longest[0] == 1 and len(q) != len(pages):
        fault("paged attention: rows of one query and pages differ")
    if k.shape != v.shape or k.shape[1] % 256:
        fault(f"paged attention: pages of {tuple(k.shape)}; they have a multiple of 256 tokens")
    if (*lengths.shape, *(len(x) - 1 for x in ends)) != (len(pages),) * 3 or longest[1] > pages.shape[1] * k.shape[1]:
        fault("paged attention: rows of lengths and pages differ, or the longest has too few pages")
    left, right = window_size
    if right and longest[0] > 1:
        fault("paged attention: queries see keys behind them")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.pretended.paged_attention(q, k, v, ends[0], pages, lengths, left, not right, scale)


def varlen_attention(
    q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, scale=None, enable_gqa=False, seqused_k=None,
    block_table=None, num_splits=None,
):  # fmt: skip
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in (torch.bfloat16, torch.float16):
        fault(f"varlen attention of {[x.dtype for x in (q, k, v)]}")
    if torch.cuda.get_device_capability()[0] < 8:
        fault("varlen attention of a GPU before A100")
    if any(x.stride(-1) != 1 for x in (q, k, v)) or not (cu_seq_q.is_contiguous() and cu_seq_k.is_contiguous()):
        fault("varlen attention: heads or lengths are not dense")
    if not all(isinstance(most, int) for most in (max_q, max_k)):
        fault("varlen attention: longest sequences are no numbers of the host")
    if any(ends.dtype != torch.int32 or not isinstance(ends, DeviceTensor) for ends in (cu_seq_q, cu_seq_k)):
        fault("varlen attention: lengths are not int32 on the device")
    if q.shape[-1] % 8 or q.shape[-1] > 256 or not (q.shape[-1] == k.shape[-1] == v.shape[-1]):
        fault(f"varlen attention of widths {[x.shape[-1] for x in (q, k, v)]}")
    if not enable_gqa and q.shape[1] != k.shape[-2]:
        fault("varlen attention: heads differ")
    if block_table is not None:
        if num_splits != 1:
            fault("varlen attention over pages: torch 2.13 joins several splits wrongly")
        ends, longest = (cu_seq_q, cu_seq_k), (max_q, max_k)
        return paged_attention(q, k, v, ends, longest, window_size, scale, seqused_k, block_table)
    lengths = [ends._inner.diff() for ends in (cu_seq_q, cu_seq_k)]
    if [(int(own.sum()), int(own.max())) for own in lengths] != [(len(q), max_q), (len(k), max_k)]:
        fault("varlen attention: lengths do not cover the tokens")
    of = [torch.repeat_interleave(torch.arange(len(own)), own) for own in lengths]
    left = [ends._inner[1:][own] - torch.arange(len(own)) for ends, own in zip((cu_seq_q, cu_seq_k), of)]
    behind = left[1] - left[0][:, None]  # places of a key before its query: the last ones are at the same place
    seen = (of[0][:, None] == of[1]) & (behind >= 0)
    if window_size[0] >= 0:
        seen &= behind <= window_size[0]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    more = {"scale": scale, "enable_gqa": enable_gqa}
    return attention(q, k, v, DeviceTensor(seen[None, None]), **more)[0].transpose(0, 1)


def install():
    """Put them in the places of torch's own; to import the module of one would take a second. No Triton: nothing runs
    what it compiles."""
    sys.modules["triton"] = None
    varlen = types.ModuleType("torch.nn.attention.varlen")
    sys.modules[varlen.__name__] = varlen
    torch.nn.functional.scaled_dot_product_attention = attention
    torch.nn.functional.rms_norm = rms_norm
    varlen.varlen_attn = varlen_attention
