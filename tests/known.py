"""Models whose weights are set by hand, so that patterns, writes and logits have closed forms. Float64.

All are attention-only with one head a block, without norms and biases, untied. The stream is cut into spans with one
purpose each: a token's or a position's one-hot row, or what a head writes. Attention is not scaled: a score is q.k.
"""

from typing import NamedTuple

import torch
from torch import Tensor, eye

from mainstem.config import ModelConfig
from mainstem.model.gpt import GPT

SURE = 60.0  # a score beside which the keys of score 0 get less than float64 can add to 1

KEEP, IN, AT, MIND, BAY = range(5)
"""The tokens of `skip_trigram`: keep in mind, keep at bay."""
SKIP_DIRECT = torch.zeros(5, 5, dtype=torch.float64)
"""[present token, next token]: the logit without the head."""
SKIP_DIRECT[[IN, AT], [MIND, BAY]] = 1.0
SKIP_QK = torch.zeros(5, 5, dtype=torch.float64)
"""[present token, earlier token]: the score."""
SKIP_QK[[IN, AT], [KEEP, KEEP]] = 3.0
SKIP_OV = torch.zeros(5, 5, dtype=torch.float64)
"""[token attended to, next token]: what attending to it adds to the logit."""
SKIP_OV[[KEEP, KEEP, MIND], [MIND, BAY, KEEP]] = torch.tensor([4.0, 4.0, -2.0], dtype=torch.float64)


class Head(NamedTuple):
    """Views of the weights of a block's only head."""

    q: Tensor  # (D, C)
    k: Tensor  # (D, C)
    v: Tensor  # (D, C)
    o: Tensor  # (C, D)


def blank(**shape: object) -> tuple[GPT, list[Head]]:
    """A model with all weights zero, in evaluation mode, and its heads."""
    fixed = {"n_head": 1, "d_mlp": 0, "residual": "none", "bias": False, "tie_embeddings": False, "attn_scale": 1.0}
    model = GPT(ModelConfig(**fixed | shape)).double().eval()
    for parameter in model.parameters():
        parameter.zero_()
    return model, [Head(*block.attn.c_attn.weight.chunk(3), block.attn.c_proj.weight) for block in model.blocks]


def spans(*widths: int) -> list[slice]:
    """Neighbouring spans of the stream."""
    ends = torch.tensor(widths).cumsum(0).tolist()
    return [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]


def periodic(V: int, T: int, period: int) -> Tensor:
    """Ids (1, T) of `induction`: V - 1, which does not come again, then 0, 1, ... period - 1, 0, 1, ...

    Without a first token of its own, that token would look like its own successor: position 0 attends to itself.
    """
    assert period < V
    return torch.cat([torch.tensor([V - 1]), torch.arange(T - 1) % period])[None]


@torch.no_grad()
def induction(V: int = 7, T: int = 16, beta: float = 12.0) -> GPT:
    """Two heads that go on with a repeated sequence (Elhage et al. 2021, "Induction Heads").

    The stream is tok[V] pos[T] prev[V] out[V]. L0H0 writes the token before each position to `prev`; L1H0 attends to
    the positions whose `prev` is the present token, and writes the tokens there to `out`, which the logits read. On
    `periodic(V, T, p)`, with e = exp(beta):

        L0 pattern[i, i - 1] = e / (e + i), for i >= 1; the rest of the row is even
        L1 pattern[i, i - p + 1] = e / (e + i), for p < i <= 2 p; the rest of the row is almost even
        logits[i] = the sum over j of L1 pattern[i, j] one_hot(ids[j])

    The second is not exact, for a score of L1 is beta times L0's weight, not quite beta: at beta 12 it holds to 1e-6.
    For i > 2 p there are m = (i - 1) // p such positions, i - p + 1, i - 2 p + 1, ..., which share the weight; they get
    e / (m e + i + 1 - m) each, to within beta i / e.
    """
    D = max(V, T)  # each head uses as much of it as it needs
    model, (previous, successor) = blank(vocab_size=V, n_ctx=T, n_layer=2, d_model=3 * V + T, d_head=D)
    tok, pos, prev, out = spans(V, T, V, V)
    model.wte.weight[:, tok] = eye(V)
    model.wpe.weight[:, pos] = eye(T)
    previous.q[:, pos] = eye(D, T)
    previous.k[:, pos] = beta * eye(D, T + 1)[:, 1:]  # the key of position j is the query of j + 1
    previous.v[:, tok] = eye(D, V)
    previous.o[prev] = eye(V, D)
    successor.q[:, tok] = eye(D, V)
    successor.k[:, prev] = beta * eye(D, V)
    successor.v[:, tok] = eye(D, V)
    successor.o[out] = eye(V, D)
    model.lm_head.weight[:, out] = eye(V)
    return model


@torch.no_grad()
def eraser(V: int = 5, T: int = 8) -> GPT:
    """L0H0 writes the token before each position; L1H0, attending to the present position, writes its negative.

    The stream is tok[V] pos[T] prev[V]. The two writes have cosine -1; `prev`, which the logits read, ends as 0.
    Without L1H0 logits[i] = one_hot(ids[i - 1]), and logits[0] = one_hot(ids[0]).
    """
    D = max(V, T)
    model, (previous, negative) = blank(vocab_size=V, n_ctx=T, n_layer=2, d_model=2 * V + T, d_head=D)
    tok, pos, prev = spans(V, T, V)
    model.wte.weight[:, tok] = eye(V)
    model.wpe.weight[:, pos] = eye(T)
    previous.q[:, pos] = eye(D, T)
    previous.k[:, pos] = SURE * eye(D, T + 1)[:, 1:]
    previous.v[:, tok] = eye(D, V)
    previous.o[prev] = eye(V, D)
    negative.q[:, pos] = eye(D, T)
    negative.k[:, pos] = SURE * eye(D, T)
    negative.v[:, prev] = eye(D, V)
    negative.o[prev] = -eye(V, D)
    model.lm_head.weight[:, prev] = eye(V)
    return model


@torch.no_grad()
def copying(sign: float = 1.0, V: int = 5, T: int = 8) -> GPT:
    """One head that attends evenly and raises (sign 1) or lowers (-1) the logits of the tokens that it sees.

    W_U W_E is the identity, and W_U W_O W_V W_E is sign times it, so that all its eigenvalues are `sign`.
    logits[i] = one_hot(ids[i]) + sign * mean over j <= i of one_hot(ids[j]).
    """
    model, (head,) = blank(vocab_size=V, n_ctx=T, n_layer=1, d_model=V, d_head=V, position="none")
    model.wte.weight[:] = eye(V)
    head.v[:] = eye(V)
    head.o[:] = sign * eye(V)
    model.lm_head.weight[:] = eye(V)
    return model


@torch.no_grad()
def skip_trigram(T: int = 8) -> GPT:
    """One head that knows "keep ... in mind" and "keep ... at bay", and so cannot but know "keep ... in bay" (Elhage et
    al. 2021, "Skip-Trigram Bugs"): where it attends and what it copies are two tables.

    logits[i] = SKIP_DIRECT[ids[i]] + sum over j <= i of softmax_j(SKIP_QK[ids[i], ids[j]]) SKIP_OV[ids[j]].
    """
    V = len(SKIP_DIRECT)
    model, (head,) = blank(vocab_size=V, n_ctx=T, n_layer=1, d_model=2 * V, d_head=V, position="none")
    tok, out = spans(V, V)
    model.wte.weight[:, tok] = eye(V)
    head.q[:, tok] = eye(V)
    head.k[:, tok] = SKIP_QK
    head.v[:, tok] = SKIP_OV.T
    head.o[out] = eye(V)
    model.lm_head.weight[:, tok] = SKIP_DIRECT.T
    model.lm_head.weight[:, out] = eye(V)
    return model


@torch.no_grad()
def bigram(counts: Tensor, T: int = 8) -> GPT:
    """No blocks: logits[i] = log of row ids[i] of `counts`, (V, V), [present token, next token], as probabilities.

    All counts are above 0.
    """
    V = len(counts)
    model, _ = blank(vocab_size=V, n_ctx=T, n_layer=0, d_model=V, position="none")
    model.wte.weight[:] = eye(V)
    model.lm_head.weight[:] = (counts.double() / counts.sum(1, keepdim=True)).log().T
    return model
