"""How tensor parallelism splits a decoder: sequence parallel between the blocks, columns then rows inside them."""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from models import TensorParallelPlan
from models.decoder import DecoderArgs


def plan_outside_blocks(loss_parallel: bool) -> TensorParallelPlan:
    """The plan of embedding, last norm and head. Between the blocks each rank has a part of the sequence (Korthikanti
    et al., arXiv 2205.05198). With `loss_parallel` the logits stay DTensors that are split along the vocabulary."""
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }


def plan_of_block(qk_norm: bool = False) -> TensorParallelPlan:
    """The plan of a block of `models.layers.Attention` and `models.layers.FeedForward`."""
    # Every rank has some of the heads, and the whole weight of the norms over each of them.
    norm_of_heads = SequenceParallel(sequence_dim=2, use_local_output=True)
    return {
        **({"attention.q_norm": norm_of_heads, "attention.k_norm": norm_of_heads} if qk_norm else {}),
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }


def decoder_plan(
    args: DecoderArgs, loss_parallel: bool, qk_norm: bool
) -> tuple[TensorParallelPlan, list[TensorParallelPlan]]:
    """Of a dense family: (the plan outside the blocks, the plan of each block)."""
    return plan_outside_blocks(loss_parallel), [plan_of_block(qk_norm) for _ in range(args.n_layers)]
