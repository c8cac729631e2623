"""The few layers a drafter is made of. Module names are Hugging Face's, so checkpoints carry the usual keys.

Letters: D hidden, Q heads, K kv heads, H head dim; leading dimensions are free.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .spec import BlockSpec

Spread = Callable[[Tensor], Tensor] | None
ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh")}


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32 whatever the input's dtype, times offset + weight; it starts as times one."""

    def __init__(self, dim: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full((dim,), 1.0 - offset))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + self.offset if self.offset else self.weight.float()
        if x.is_cuda or torch.compiler.is_compiling():
            return F.rms_norm(x.float(), x.shape[-1:], weight, self.eps).to(x.dtype)
        normed: Tensor = _Norm.apply(x, weight, self.eps)
        return normed


class _Norm(torch.autograd.Function):
    """RMSNorm where no kernel is made for it (CPU): fewer passes and calls. x [..., D], weight [D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact = x.to(weight.dtype)
        scale = (exact * exact).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (exact * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """With y = x scale weight: d x = scale (d y weight - x scale^2 mean(d y weight x))."""
        x, weight, scale = ctx.saved_tensors
        exact, d = x.to(weight.dtype), grad.to(weight.dtype)
        both = (d * exact).reshape(-1, len(weight))
        d_weight = both.T.mv(scale.reshape(-1))
        mean = both.mv(weight).view(scale.shape).mul_(scale.square()).div_(len(weight))
        d_x = torch.mul(d, weight, out=both.view(d.shape)).addcmul_(exact, mean, value=-1).mul_(scale)
        return d_x.to(x.dtype), d_weight, None


class GatedMLP(nn.Module):
    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.dim, spec.mlp_dim, bias=False)
        self.up_proj = nn.Linear(spec.dim, spec.mlp_dim, bias=False)
        self.down_proj = nn.Linear(spec.mlp_dim, spec.dim, bias=False)
        self.act = ACTIVATIONS[spec.act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Rotary(nn.Module):
    """Cosines and sines of rotary positions."""

    inv_freq: Tensor

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.factor = spec.rope_factor
        self.register_buffer("inv_freq", torch.tensor(spec.inv_freq, dtype=torch.float32), persistent=False)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Move with the module but stay float32: `.to(bfloat16)` would ruin the frequencies."""
        exact = self.inv_freq
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32:
            self.inv_freq = exact.to(self.inv_freq.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [...] -> cos, sin, each [..., 1, H] float32 (the 1 is for heads)."""
        angles = positions[..., None, None].float() * self.inv_freq
        angles = torch.cat([angles, angles], -1)
        return angles.cos() * self.factor, angles.sin() * self.factor


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of x [..., heads, H] by `rotary` = cos, sin [..., 1, H]."""
    cos, sin = (r.to(x.dtype) for r in rotary)
    if x.is_cuda or torch.compiler.is_compiling():
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-right, left], dim=-1) * sin
    turned: Tensor = _Turn.apply(x, cos, sin)
    return turned


class _Turn(torch.autograd.Function):
    """`rotate`, without copies; its gradient turns back. Both halves of cos, and of sin, are the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, way: int) -> Tensor:
    (left, right), sin = x.chunk(2, dim=-1), sin[..., : x.shape[-1] // 2]
    turned = x * cos
    a, b = turned.chunk(2, dim=-1)
    a.addcmul_(right, sin, value=-way)
    b.addcmul_(left, sin, value=way)
    return turned


class Attention(nn.Module):
    """Grouped-query attention whose keys and values are computed apart from its queries.

    That split is all KV injection needs: project the target's context with `kv`, the block's own positions with `kv`,
    and attend over both. `spread` copies what is known before its position is, to all positions it has. q_norm and
    k_norm belong to block drafters on every family: it is what servers load.
    """

    def __init__(self, spec: BlockSpec, *, width: int | None = None, qk_norm: bool = True) -> None:
        """width: of the inputs, where it is not D."""
        super().__init__()
        width = spec.dim if width is None else width
        self.head_dim, self.scale = spec.head_dim, spec.attn_scale
        self.norm_values, self.eps = spec.norm_values, spec.norm_eps
        self.q_proj = nn.Linear(width, spec.heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(width, spec.kv_heads * spec.head_dim, bias=False)
        self.v_proj = None if spec.share_kv else nn.Linear(width, spec.kv_heads * spec.head_dim, bias=False)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, spec.dim, bias=False)
        norms = [RMSNorm(spec.head_dim, spec.norm_eps, spec.norm_offset) if qk_norm else nn.Identity() for _ in "qk"]
        self.q_norm, self.k_norm = norms

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def kv(self, x: Tensor, rotary: tuple[Tensor, Tensor], spread: Spread = None) -> tuple[Tensor, Tensor]:
        """x [..., width] -> keys and values, each [..., K, H]."""
        return self.placed_kv(self.k_proj(x), None if self.v_proj is None else self.v_proj(x), rotary, spread)

    def placed_kv(
        self, keys: Tensor, values: Tensor | None, rotary: tuple[Tensor, Tensor], spread: Spread = None
    ) -> tuple[Tensor, Tensor]:
        """What the projections give [..., K * H] (values None: they are the keys') -> keys and values [..., K, H]."""
        keys = self._heads(keys)
        values = keys if values is None else self._heads(values)
        if self.norm_values:
            values = F.rms_norm(values.float(), values.shape[-1:], None, self.eps).to(values.dtype)
        keys = self.k_norm(keys)
        if spread is not None:
            keys, values = spread(keys), spread(values)
        return rotate(keys, rotary), values

    def q(self, x: Tensor, rotary: tuple[Tensor, Tensor], spread: Spread = None) -> Tensor:
        """x [..., width] -> queries [..., Q, H]."""
        return self.placed_q(self.q_proj(x), rotary, spread)

    def placed_q(self, queries: Tensor, rotary: tuple[Tensor, Tensor], spread: Spread = None) -> Tensor:
        """What the projection gives [..., Q * H] -> queries [..., Q, H]."""
        queries = self.q_norm(self._heads(queries))
        return rotate(queries if spread is None else spread(queries), rotary)


class Block(nn.Module):
    """A pre-norm decoder block, Gemma's where the spec says so; `attend(q, k, v)` decides what its queries see.

    With `aside` (Eagle3) its attention reads two streams, a second one beside the residual: `hidden_norm` norms the
    residual, `input_layernorm` the other.
    """

    layer_scalar: Tensor | None

    def __init__(self, spec: BlockSpec, *, aside: bool = False, qk_norm: bool = True) -> None:
        super().__init__()
        self.self_attn = Attention(spec, width=2 * spec.dim if aside else spec.dim, qk_norm=qk_norm)
        self.mlp = GatedMLP(spec)
        self.input_layernorm = spec_norm(spec)
        self.hidden_norm = spec_norm(spec) if aside else None
        # after the attention: on the residual stream, or on the branch's output where norms are sandwiched
        self.post_attention_layernorm = spec_norm(spec)
        self.pre_feedforward_layernorm = spec_norm(spec) if spec.sandwich else None
        self.post_feedforward_layernorm = spec_norm(spec) if spec.sandwich else None
        self.register_buffer("layer_scalar", torch.ones(1) if spec.layer_scalar else None)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend, spread: Spread = None) -> Tensor:  # type: ignore[no-untyped-def]
        """x [..., D]; attend: queries [..., Q, H], keys and values [..., K, H] -> [..., Q, H]. spread: from the
        distinct inputs, which x then holds, to all places, [..., n, *] -> [..., N, *]."""
        h = self.input_layernorm(x)
        seen = attend(self.self_attn.q(h, rotary, spread), *self.self_attn.kv(h, rotary, spread))
        return self.finish(x if spread is None else spread(x), seen)

    def finish(self, x: Tensor, seen: Tensor) -> Tensor:
        """The block after its attention: residual x [..., D] and what the queries saw [..., Q, H] -> [..., D]."""
        branch = self.self_attn.o_proj(seen.flatten(-2))
        if self.pre_feedforward_layernorm is None or self.post_feedforward_layernorm is None:
            x = x + branch
            x = x + self.mlp(self.post_attention_layernorm(x))
        else:
            x = x + self.post_attention_layernorm(branch)
            x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x if self.layer_scalar is None else x * self.layer_scalar


def spec_norm(spec: BlockSpec) -> RMSNorm:
    """A norm of the residual stream as `spec` has them."""
    return RMSNorm(spec.dim, spec.norm_eps, spec.norm_offset)
