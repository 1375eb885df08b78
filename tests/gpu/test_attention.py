"""The largest attention logits, as the fused kernel returns them."""

import pytest
import torch

from models.layers import Attention, causal_attention, causal_attention_with_maxima, rope_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_maxima_and_output_are_those_of_plain_attention(kv_heads, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 300, heads, 64, device="cuda", dtype=dtype) * 2 for heads in (8, kv_heads, kv_heads))
    for x in (q, k, v):
        x.requires_grad_()
    out, maxima = causal_attention_with_maxima(q, k, v)
    reference = causal_attention(*(x.double() for x in (q, k, v)))
    tolerance = 2e-2 if dtype == torch.bfloat16 else 5e-3  # tf32 in the fused kernel
    torch.testing.assert_close(out.double(), reference, atol=tolerance, rtol=tolerance)
    allowed = torch.ones(300, 300, device="cuda", dtype=torch.bool).tril()
    for head in range(8):
        logits = torch.einsum("bid,bjd->bij", q[:, :, head].double(), k[:, :, head * kv_heads // 8].double()) / 8.0
        expected = logits.masked_fill(~allowed, -torch.inf).max()
        torch.testing.assert_close(maxima[head].double(), expected, atol=0.0, rtol=5e-3)
    got = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    want = torch.autograd.grad(reference.square().sum(), (q, k, v))
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).norm() / b.norm() < 2e-2


def test_inside_a_compiled_block():
    torch.manual_seed(0)
    attention = Attention(128, 4, 2, 32).cuda().bfloat16()
    noted = attention.track_max_logits(torch.device("cuda"))
    x = torch.randn(2, 256, 128, device="cuda", dtype=torch.bfloat16)
    rope = rope_table(256, 32, 1e4).cuda()
    attention(x, rope).sum().backward()
    eager, gradient = noted.clone(), attention.wq.weight.grad.clone()
    noted.zero_()
    attention.zero_grad()
    torch.compile(attention, fullgraph=True)(x, rope).sum().backward()
    torch.testing.assert_close(noted, eager, rtol=1e-2, atol=0)
    torch.testing.assert_close(attention.wq.weight.grad, gradient, rtol=5e-2, atol=5e-1)
