"""The decoder that dense families share: its args, its block, the model, and the distribution every parameter starts
from.

Parameter names are TorchTitan's (`layers.0.attention.wq.weight`). The model knows of no ranks: the trainer applies
sharding, activation checkpointing and compilation to it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models import Parts
from models.flops import attention_flops, linear_flops
from models.layers import Attention, FeedForward, RMSNorm, RopeScaling, rope_table

_NORM = re.compile(r"(norm|layers\.\d+\.(attention_norm|ffn_norm|attention\.[qk]_norm))\.weight")
_LINEAR = re.compile(r"layers\.(?P<layer>\d+)\.(?P<name>attention\.w[qkvo]|feed_forward\.w[123])\.weight")


@dataclass(frozen=True, kw_only=True)
class DecoderArgs:
    """The shape of a decoder. Raises ValueError naming the field if the figures do not fit together.

    Attributes:
        dim: width of the residual stream.
        n_layers: number of blocks.
        n_heads: query heads.
        n_kv_heads: key and value heads; divides `n_heads`.
        ffn_hidden_dim: inner width of the feed-forward.
        vocab_size: rows of the embedding; None for the tokenizer's, which the caller sets before it builds the model.
        norm_eps: added to the mean square in every norm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: Llama 3.1's long-context scaling, or None.
        max_seq_len: tokens of the longest sequence that `forward` takes, and rows of the rotary table.
        tie_embeddings: the head is the embedding matrix.
        init_std: standard deviation of the linears' initial weights.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_hidden_dim: int
    vocab_size: int | None = None
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    max_seq_len: int = 8192
    tie_embeddings: bool = False
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
                raise ValueError(f"{field} must be positive, got {value}")
        if self.head_dim % 2:
            raise ValueError(f"the width of a head must be even for the rotary embedding, got {self.head_dim}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads ({self.n_kv_heads}) must divide n_heads ({self.n_heads})")

    @property
    def head_dim(self) -> int:
        """Width of one head. A family whose heads have a width of their own has a field of this name."""
        return self.dim // self.n_heads


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream.

    Args:
        args: of the model.
        qk_norm: a norm over each head of the queries and of the keys.
    """

    def __init__(self, args: DecoderArgs, qk_norm: bool = False) -> None:
        super().__init__()
        qk_norm_eps = args.norm_eps if qk_norm else None
        self.attention = Attention(args.dim, args.n_heads, args.n_kv_heads, args.head_dim, qk_norm_eps)
        self.feed_forward = FeedForward(args.dim, args.ffn_hidden_dim)
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """`x`: [batch, seq, dim], `rope`: [seq, head_dim] -> [batch, seq, dim]."""
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    """Embedding, blocks, norm and head; the base class of a family's model.

    A model built on a real device has initial weights (seed 0) and is ready to use. A model built under
    `torch.device("meta")` is materialised by the caller: `to_empty`, `tie_weights` (`to_empty` breaks the tie),
    `init_buffers`, and `init_parameter` for each of `named_parameters()`, or `init_weights` for all.

    With `tie_embeddings` head and embedding are one Parameter. `named_parameters()` gives the Parameter once, as
    `tok_embeddings.weight`; `state_dict()` has both names, which share storage.
    """

    def __init__(self, args: DecoderArgs, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        if args.vocab_size is None:
            raise ValueError(
                "vocab_size is None (the tokenizer's): build from dataclasses.replace(args, vocab_size=...)"
            )
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        self.tie_weights()
        self.init_buffers()
        if not self.tok_embeddings.weight.is_meta:
            self.init_weights()

    def forward(self, tokens: Tensor) -> Tensor:
        """Next-token logits.

        Args:
            tokens: int64 [batch, seq], with seq at most `max_seq_len` (ValueError otherwise).

        Returns:
            [batch, seq, vocab_size] in the compute dtype; the caller's loss converts them to fp32.
        """
        seq_len = tokens.shape[1]
        if seq_len > self.args.max_seq_len:
            raise ValueError(
                f"the sequence has {seq_len} tokens but max_seq_len is {self.args.max_seq_len}: "
                "shorten it or build the model with a larger max_seq_len"
            )
        x = self.tok_embeddings(tokens)
        # One cast for all blocks. The table itself stays fp32, whatever the compute dtype is.
        rope = self.rope_table[:seq_len].to(x.dtype)
        for layer in self.layers:
            x = layer(x, rope)
        return self.output(self.norm(x))

    def tie_weights(self) -> None:
        """Make the head the embedding's Parameter again if the args tie the two; `to_empty` breaks the tie."""
        if self.args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def init_buffers(self, device: torch.device | str | None = None) -> None:
        """(Re)create the rotary table: `rope_table`, fp32 [max_seq_len, head_dim], not in the state dict.

        Args:
            device: of the table; by default the embedding's. On `meta` the table has a shape and no values.
        """
        args = self.args
        device = torch.device(device) if device is not None else self.tok_embeddings.weight.device
        if device.type == "meta":
            table = torch.empty(args.max_seq_len, args.head_dim, dtype=torch.float32, device=device)
        else:
            table = rope_table(args.max_seq_len, args.head_dim, args.rope_theta, args.rope_scaling).to(device)
        self.register_buffer("rope_table", table, persistent=False)

    def init_weights(self, seed: int = 0) -> None:
        """Fill every parameter with initial values, one after the other, for a model held whole in one process.

        A parameter's values depend on `seed`, on the shapes of all parameters before it, and on the kind of device.
        A run draws each parameter by itself, on whichever rank holds it: `torchtitan_dmuon/initialization.py`.
        """
        generator = torch.Generator(device=self.tok_embeddings.weight.device).manual_seed(seed)
        for fqn, parameter in self.named_parameters():
            self.init_parameter(fqn, parameter, generator)

    @torch.no_grad()
    def init_parameter(self, fqn: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill the full tensor of one parameter in place with its initial values.

        The values depend on `fqn`, the tensor's shape and dtype, and the generator's state alone:

        - norms are one;
        - linears are normal with std `init_std`; the std of `wo` and `w2`, which write to the residual stream, is
          divided by `sqrt(2 * (layer + 1))`;
        - the head is normal with std `init_std`, so that a fresh model predicts nearly uniformly (a loss of ln V);
        - an untied embedding is normal with std 1;
        - a tied embedding takes the head's `init_std`: a token's own embedding is still in the residual stream when the
          head reads the stream, and with a larger std a fresh model would repeat its input with certainty.

        All but the untied embedding are cut off at 3 standard deviations.

        Args:
            fqn: the parameter's name in the plain model, without the prefixes that wrappers insert.
            tensor: the whole parameter, not a shard; in fp32, so that values do not depend on the compute dtype.
            generator: on the tensor's device.

        Raises:
            ValueError: the model has no parameter of that name.
        """
        if _NORM.fullmatch(fqn):
            tensor.fill_(1.0)
        elif fqn == "tok_embeddings.weight" and not self.args.tie_embeddings:
            tensor.normal_(0.0, 1.0, generator=generator)
        else:
            std = self._matrix_std(fqn)
            nn.init.trunc_normal_(tensor, std=std, a=-3 * std, b=3 * std, generator=generator)

    def _matrix_std(self, fqn: str) -> float:
        if fqn in ("tok_embeddings.weight", "output.weight"):
            return self.args.init_std
        match = _LINEAR.fullmatch(fqn)
        if match is None or int(match["layer"]) >= self.args.n_layers:
            raise ValueError(
                f"{type(self).__name__} has no parameter {fqn!r}; strip wrapper prefixes such as '_orig_mod.' first"
            )
        if match["name"] in ("attention.wo", "feed_forward.w2"):
            return self.args.init_std / (2 * (int(match["layer"]) + 1)) ** 0.5
        return self.args.init_std


def decoder_parts(model: Decoder) -> Parts:
    """A dense family's `ModelSpec.parts`."""

    def block_inputs(seq_len: int) -> tuple[Tensor]:
        return (model.rope_table[:seq_len],)

    return Parts(model.layers, (model.tok_embeddings,), model.norm, model.output, block_inputs)


def decoder_flops(model: Decoder, args: DecoderArgs, seq_len: int) -> int:
    """A dense family's `ModelSpec.flops_per_token`."""
    width = {"qk_dim": args.head_dim, "v_dim": args.head_dim}
    attention = attention_flops(n_layers=args.n_layers, n_heads=args.n_heads, seq_len=seq_len, **width)
    return linear_flops(model) + attention


def divisible_heads(args: DecoderArgs) -> Mapping[str, int]:
    """A dense family's `ModelSpec.divisible`: tensor parallelism splits heads."""
    return {"n_heads": args.n_heads, "n_kv_heads": args.n_kv_heads}
