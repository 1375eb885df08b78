"""Layers shared by the model families: norm, rotary embedding, attention, SwiGLU.

Each layer gives the numbers of the HuggingFace layer of the same kind, in fp32 and in bf16, so that weights map one to
one by name. Blocks, models and initial distributions are in each family's `model.py`. `forward` takes the number of
heads from the outputs of the projections, never from the config: a tensor-parallel rank with a slice of the heads runs
the same code.
"""

import functools
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from models import AttentionHeads, HeadRows


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension (arXiv 1910.07467): fp32 inside, the input dtype outside.

    The layer rounds the normalised value to the input dtype before it applies the weight, as HuggingFace does.
    `nn.RMSNorm` rounds after the weight, and so differs from HuggingFace in bf16.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """`x`: [..., dim] of any float dtype -> the same shape and dtype."""
        x_fp32 = x.float()
        x_fp32 = x_fp32 * torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + self.eps)
        # An fp32 weight (a dtype policy may keep norms in fp32) must not promote a bf16 activation.
        return x_fp32.to(x.dtype) * self.weight.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency scaling (`rope_type = "llama3"` in HuggingFace).

    With `original_max_seq_len` 8192, `low_freq_factor` 1 and `high_freq_factor` 4: wavelengths above 8192 / 1 are
    stretched by `factor`, wavelengths below 8192 / 4 stay, and wavelengths between are interpolated.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"rope_scaling.factor must be at least 1, got {self.factor}")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "rope_scaling.low_freq_factor must be positive and below high_freq_factor, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )
        if self.original_max_seq_len < 1:
            raise ValueError(f"rope_scaling.original_max_seq_len must be positive, got {self.original_max_seq_len}")


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Inverse frequencies in radians per position: fp32 [head_dim / 2] on the CPU.

    The CPU computes them on every machine: `pow` differs in the last bit between devices, and position 100,000 of a
    long sequence multiplies that difference by 100,000.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    inv_freq = 1.0 / theta**exponent
    if scaling is None:
        return inv_freq

    wavelength = 2 * math.pi / inv_freq
    low_freq_wavelength = scaling.original_max_seq_len / scaling.low_freq_factor
    high_freq_wavelength = scaling.original_max_seq_len / scaling.high_freq_factor
    kept = (scaling.original_max_seq_len / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    interpolated = (1 - kept) * inv_freq / scaling.factor + kept * inv_freq
    scaled = torch.where(wavelength > low_freq_wavelength, inv_freq / scaling.factor, interpolated)
    return torch.where(wavelength < high_freq_wavelength, inv_freq, scaled)


def rope_table(max_seq_len: int, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Cosines, then sines, of every position: fp32 [max_seq_len, head_dim] on the CPU."""
    positions = torch.arange(max_seq_len, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, rope_frequencies(head_dim, theta, scaling))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def apply_rotary(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate the halves of each head against each other: HuggingFace's layout, not Meta's interleaved one.

    Args:
        x: [batch, seq, heads, head_dim].
        rope: [seq, head_dim], rows of `rope_table`. The rotation runs in `x.dtype`, as in HuggingFace.
    """
    cos, sin = rope.to(x.dtype).unsqueeze(1).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal grouped-query attention, scaled by `head_dim ** -0.5`.

    Args:
        q: [batch, seq, heads, head_dim].
        k, v: [batch, seq, kv_heads, head_dim]; each of their heads serves heads / kv_heads adjacent query heads.

    Returns:
        [batch, seq, heads, head_dim].
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    groups = q.shape[1] // k.shape[1]
    # On CUDA only the half-precision kernels (flash, cuDNN) read grouped heads natively. In fp32, enable_gqa falls back
    # to the kernel that writes out the [seq, seq] scores; repeated k and v take less memory. On the CPU both ways take
    # the same time.
    native_gqa = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    if groups > 1 and not native_gqa:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    enable_gqa = groups > 1 and native_gqa
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa).transpose(1, 2)


def causal_attention_with_maxima(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As `causal_attention`, and the largest (scaled, unmasked) logit of each head: fp32 [heads], no gradient.

    On CUDA the fused kernel of flex attention returns the maxima. On the CPU, where flex attention has no backward, the
    scores are written out once, and both the maxima and the attention read them.
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    seq_len = q.shape[2]
    if q.is_cuda:
        gqa, mask = q.shape[1] != k.shape[1], _causal_mask(seq_len, q.device)
        out, aux = _flex_attention(q, k, v, block_mask=mask, enable_gqa=gqa, return_aux=AuxRequest(max_scores=True))
        maxima = aux.max_scores.detach().amax(dim=(0, 2))
    else:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        future = torch.ones(seq_len, seq_len, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(future, -math.inf)
        maxima = scores.detach().amax(dim=(0, 2, 3)).float()
        out = scores.float().softmax(-1).to(v.dtype) @ v
    return out.transpose(1, 2), maxima


@functools.lru_cache
def _causal_mask(seq_len: int, device: torch.device) -> BlockMask:
    def is_causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return create_block_mask(is_causal, None, None, seq_len, seq_len, device=device)


# Without compilation flex attention writes out all scores. Inside a compiled block the call is part of the block's
# graph.
_flex_attention = torch.compile(flex_attention)


class Attention(nn.Module):
    """Multi-head attention with grouped keys and values, rotary positions, a causal mask and no biases.

    Args:
        qk_norm_eps: of a norm over each head of the queries and of the keys, before their rotation; None for no norms.

    Attributes:
        max_logits: fp32 [heads of this rank], the largest logits so far; None before `track_max_logits`. Every forward
            with gradients enabled raises them in place.
    """

    max_logits: Tensor | None

    def __init__(
        self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, qk_norm_eps: float | None = None
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.head_dim = head_dim
        self.register_buffer("max_logits", None, persistent=False)
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)
        self.has_qk_norm = qk_norm_eps is not None
        if qk_norm_eps is not None:
            self.q_norm, self.k_norm = RMSNorm(head_dim, qk_norm_eps), RMSNorm(head_dim, qk_norm_eps)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """`x`: [batch, seq, dim], `rope`: [seq, head_dim] -> [batch, seq, dim]."""
        batch, seq, _ = x.shape
        # -1: the number of heads of this rank; under tensor parallelism a rank has a part of the config's heads.
        q = self.wq(x).view(batch, seq, -1, self.head_dim)
        k = self.wk(x).view(batch, seq, -1, self.head_dim)
        v = self.wv(x).view(batch, seq, -1, self.head_dim)
        if self.has_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, rope), apply_rotary(k, rope)
        if self.max_logits is not None and torch.is_grad_enabled():
            out, maxima = causal_attention_with_maxima(q, k, v)
            self.max_logits.copy_(torch.maximum(self.max_logits, maxima))
        else:
            out = causal_attention(q, k, v)
        return self.wo(out.reshape(batch, seq, -1))

    def track_max_logits(self, device: torch.device, tensor_parallel_degree: int = 1) -> Tensor:
        """From now on every forward notes the largest logit of each head, for QK-clip. Returns the buffer, fp32 [heads
        of this rank]."""
        self.max_logits = torch.zeros(self.n_heads // tensor_parallel_degree, device=device)
        return self.max_logits

    def heads(self) -> AttentionHeads:
        """The layer as QK-clip and the split into heads see it. A key that serves several query heads is left alone."""
        width = self.head_dim
        query, key = (HeadRows(f"{name}.weight", 0, width, width, 0.5) for name in ("wq", "wk"))
        clipped = (query, key) if self.n_heads == self.n_kv_heads else (replace(query, exponent=1.0),)
        return AttentionHeads(
            self,
            self.n_heads,
            clipped=None if self.has_qk_norm else clipped,
            split={"wq.weight": width, "wk.weight": width, "wv.weight": width},
            track_max_logits=self.track_max_logits,
        )


def qk_heads(model: nn.Module) -> list[AttentionHeads]:
    """Those of every `Attention` of a model: a family's `ModelSpec.qk_heads`."""
    return [module.heads() for module in model.modules() if isinstance(module, Attention)]


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): `w2(silu(w1 x) * w3 x)`, no biases."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
