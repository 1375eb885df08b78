"""Plain PyTorch on one process: what the distributed code must equal. Written from the formulas, and using nothing of
``torchtitan_dmuon``."""

from __future__ import annotations

import math

import torch
from torch import nn

# Polar Express at safety 1.05, five steps, written out from the table of docs/design/formulas.md.
_RAW = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
]


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """The direct form, one matrix, in float64."""
    x = matrix.double()
    x = x / (x.norm() + 1e-7)
    if matrix.shape[0] > matrix.shape[1]:
        x = x.T
    for a, b, c in _RAW:
        r = x @ x.T
        x = a / 1.05 * x + (b / 1.05**3 * r + c / 1.05**5 * r @ r) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


ORACLE_SCALES = {
    "match_rms_adamw": lambda out, inputs: 0.2 * math.sqrt(max(out, inputs)),
    "original": lambda out, inputs: math.sqrt(max(1.0, out / inputs)),
    "spectral": lambda out, inputs: math.sqrt(out / inputs),
    "unit": lambda out, inputs: 1.0,
}


class OracleMuon:
    """One matrix at a time; AdamW for the rest.

    ``parts(name, shape)`` may cut a weight into matrices: a list of (rows, columns), each a list of indices or a slice.
    ``transposed(name)`` says that a weight is stored [in, out].
    """

    def __init__(
        self, model, is_muon, lr=0.02, momentum=0.95, nesterov=True, weight_decay=0.0, adamw_lr=1e-3,
        adamw_betas=(0.9, 0.999), adamw_weight_decay=0.01, adamw_eps=1e-8, scale="match_rms_adamw", normuon_beta2=None,
        cautious=False, parts=None, transposed=lambda name: False,
    ):  # fmt: skip
        self.scale, self.beta2, self.cautious = ORACLE_SCALES[scale], normuon_beta2, cautious
        self.parts = parts or (lambda name, shape: [(slice(None), slice(None))])
        self.transposed = transposed
        self.second = {}
        self.matrices = {n: p for n, p in model.named_parameters() if is_muon(n, p) and p.requires_grad}
        rest = [p for n, p in model.named_parameters() if n not in self.matrices and p.requires_grad]
        self.lr, self.mu, self.nesterov, self.wd = lr, momentum, nesterov, weight_decay
        self.momentum = {}
        self.adamw = torch.optim.AdamW(
            rest, lr=adamw_lr, betas=adamw_betas, weight_decay=adamw_weight_decay, eps=adamw_eps
        )
        self.model = model

    @torch.no_grad()
    def step(self):
        for name, p in self.matrices.items():
            if p.grad is None:
                continue
            m = self.momentum.setdefault(name, torch.zeros_like(p))
            m.mul_(self.mu).add_(p.grad)
            whole = p.grad + self.mu * m if self.nesterov else m
            for index, (rows, columns) in enumerate(self.parts(name, tuple(p.shape))):
                u = orthogonalize(whole[rows][:, columns])
                w = p[rows][:, columns]
                out, inputs = reversed(u.shape) if self.transposed(name) else u.shape
                if self.beta2 is not None:
                    u = self.normalize_neurons((name, index), u.T if self.transposed(name) else u)
                    u = u.T if self.transposed(name) else u
                decays = (u * w >= 0) if self.cautious else 1.0
                w = w - self.lr * self.wd * decays * w - (self.lr * self.scale(out, inputs) * u).to(p.dtype)
                wanted = torch.arange(p.numel()).view(p.shape)[rows][:, columns]
                p.view(-1)[wanted.flatten()] = w.flatten().to(p.dtype)
        self.adamw.step()
        self.zero_grad()

    def normalize_neurons(self, key, u):
        """NorMuon: one value a row."""
        mean = (u * u).sum(1) / u.shape[1]
        self.second[key] = self.beta2 * self.second.get(key, 0.0) + (1 - self.beta2) * mean
        scaled = u / (self.second[key].sqrt()[:, None] + 1e-10)
        return scaled * (u.norm() / scaled.norm())

    def zero_grad(self):
        self.model.zero_grad(set_to_none=True)


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim)

    def forward(self, x):
        h = self.norm(x)
        h = h + torch.tanh(self.q_proj(h))
        return x + self.down_proj(torch.nn.functional.silu(self.up_proj(h)))


class ToyModel(nn.Module):
    """Embedding, blocks, norm, head. Sizes are odd on purpose. Initialised from its own generator, so every process
    builds the same weights whatever its seed."""

    def __init__(self, layers=3, dim=20, hidden=36, vocab=29, seed=0, tie=False):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        if tie:
            self.lm_head.weight = self.embed.weight
        generator = torch.Generator("cpu").manual_seed(seed)
        with torch.no_grad():
            for name, p in self.named_parameters():
                drawn = torch.randn(p.shape, generator=generator, device="cpu")
                if p.ndim > 1:
                    p.copy_(drawn / math.sqrt(p.shape[1]))
                elif "norm" not in name:
                    p.copy_(0.1 * drawn)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class Skipping(ToyModel):
    """``skip`` holds the layers left out in the next forward."""

    skip = frozenset()

    def forward(self, tokens):
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x = x if index in self.skip else layer(x)
        return self.lm_head(self.norm(x))


class Experts(nn.Module):
    def __init__(self, experts, dim, hidden):
        super().__init__()
        self.up_proj = nn.Parameter(torch.empty(experts, hidden, dim))
        self.down_proj = nn.Parameter(torch.empty(experts, dim, hidden))

    def forward(self, x, weights):
        h = torch.nn.functional.silu(torch.einsum("bsd,ehd->bseh", x, self.up_proj))
        return torch.einsum("bseh,edh,bse->bsd", h, self.down_proj, weights)


class ExpertModel(ToyModel):
    """Each block has a router and 5 experts, more and fewer than owners divide."""

    class Block(nn.Module):
        def __init__(self, dim, hidden):
            super().__init__()
            self.norm = nn.LayerNorm(dim)
            self.router = nn.Linear(dim, 5, bias=False)
            self.experts = Experts(5, dim, hidden)

        def forward(self, x):
            h = self.norm(x)
            return x + self.experts(h, self.router(h).softmax(-1))

    def __init__(self, seed=0):
        super().__init__(layers=0)
        self.layers = nn.ModuleList(self.Block(20, 12) for _ in range(2))
        generator = torch.Generator("cpu").manual_seed(seed)
        with torch.no_grad():
            for _, p in sorted(self.named_parameters()):
                if p.ndim > 1:
                    p.copy_(0.3 * torch.randn(p.shape, generator=generator, device="cpu"))


def is_proj(name, p):
    return "proj" in name and p.ndim == 2


def batch(step: int, rank: int, size: int = 4, length: int = 7, vocab: int = 29):
    """(tokens, labels) of one rank at one step: different on every rank and step."""
    generator = torch.Generator("cpu").manual_seed(1000 * step + rank)
    tokens = torch.randint(vocab, (size, length + 1), generator=generator, device="cpu").to(torch.get_default_device())
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train_one_process(model, optimizer, steps, world, start=0, loss_fn=loss_of, micro=1):
    """``steps`` of plain training on the concatenated batches of ``world`` ranks (and ``micro`` micro-batches)."""
    losses = []
    for step in range(start, start + steps):
        parts = [batch(step * micro + m, rank) for m in range(micro) for rank in range(world)]
        tokens, labels = (torch.cat(x) for x in zip(*parts, strict=True))
        loss = loss_fn(model(tokens), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
