"""Witnesses: small models, trained here, in which the circuits that the weights are searched for are known to grow.

None, one and two attention-only blocks, without norms (Elhage et al. 2021, "A Mathematical Framework for Transformer
Circuits"). `pytest -o junit_family=xunit1 --junitxml=FILE -m "" tests/circuits/test_witnesses.py` writes all figures.
"""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from logits_by_path import contributions

from mainstem.circuits.bigrams import bigrams
from mainstem.circuits.composition import composition
from mainstem.circuits.heads import head_scores, repeated
from mainstem.circuits.skip_trigrams import skip_trigrams
from mainstem.config import ModelConfig
from mainstem.model.gpt import GPT
from mainstem.text import tokenizer
from mainstem.text.corpus import Source
from models import Change, error


@pytest.fixture(scope="module")
def plays():
    """The first plays, half a million characters."""
    return "".join(piece.text for piece in itertools.islice(Source(("shakespeare",)).pieces(), 8))


def attention_only(layers, **shape):
    """The config of a model of so many blocks, without MLPs, norms and biases."""
    fixed = {"d_mlp": 0, "residual": "none", "bias": False, "tie_embeddings": False, "init": "width"}
    return ModelConfig(n_layer=layers, **fixed | shape)


def trained(config, loss_of, steps, lr, seed=1, warmup=20):
    """A model after `steps` of AdamW on loss_of(model), at a rate that rises over the warm-up and falls to a tenth."""
    model = GPT(config, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / warmup) * (1 - 0.9 * step / steps)
        optimizer.zero_grad()
        loss_of(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def next_token_loss(model, ids):
    """The mean cross-entropy of windows, (B, T + 1)."""
    return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])


def test_without_blocks_a_model_becomes_the_bigram_table(plays, record_property):
    """Its loss is the entropy of the text's bigrams, and its direct path their table."""
    characters = tokenizer.train("char", [plays])
    ids, V = torch.tensor(characters.encode(plays)), characters.vocab_size
    counts = torch.zeros(V, V).index_put_((ids[:-1], ids[1:]), torch.ones(len(ids) - 1), accumulate=True)
    share, table = counts.sum(1) / counts.sum(), counts / counts.sum(1, keepdim=True).clamp(min=1)
    entropy = -(share * torch.special.xlogy(table, table).sum(1)).sum().item()

    def loss_of(model):  # over the whole text at once: only the counts matter
        return -(counts * model(torch.arange(V)[:, None])[:, 0].log_softmax(-1)).sum() / counts.sum()

    config = attention_only(0, vocab_size=V, n_ctx=1, d_model=128, n_head=1, position="none")
    model = trained(config, loss_of, steps=300, lr=0.1, warmup=1)
    loss, found = loss_of(model).item(), bigrams(model)
    predicted = torch.stack([found.row(token) for token in range(V)]).softmax(-1)
    distance = (share * (predicted - table).abs().sum(1) / 2).sum().item()
    record_property("loss, entropy and distance", (loss, entropy, distance))
    assert 0 < loss - entropy < 0.01
    assert distance < 0.02


class OneBlock:
    """A model of one attention-only block, trained on byte pairs of a text."""

    def __init__(self, text, seed, steps):
        pairs = tokenizer.train("bpe", [text], 512)
        self.ids, self.V, self.T = torch.tensor(pairs.encode(text)), pairs.vocab_size, 32
        config = attention_only(1, vocab_size=self.V, n_ctx=self.T, d_model=64, n_head=4)
        generator = torch.Generator().manual_seed(seed)

        def loss_of(model):
            starts = torch.randint(len(self.ids) - self.T, (32, 1), generator=generator)
            return next_token_loss(model, self.ids[starts + torch.arange(self.T + 1)])

        self.model = trained(config, loss_of, steps, lr=1e-2, seed=seed)

    def occurring(self):
        """Which (source, destination, out) the text has, (V, V, V): out follows the destination, both in a window."""
        found, ids = np.zeros((self.V,) * 3, bool), self.ids.numpy()
        for gap in range(1, self.T):
            found[ids[: -gap - 1], ids[gap:-1], ids[gap + 1 :]] = True
        return found

    def compare(self):
        """How many occur of the 200 strongest triples, of 200 random ones, and of 200 that follow tokens' frequency."""
        strongest = np.array(list({row[:3] for row in skip_trigrams(self.model, top=200).trigrams}))
        rng, many, text = np.random.default_rng(0), 100, self.occurring()
        uniform = rng.integers(self.V, size=(200 * many, 3))
        frequent = self.ids.numpy()[rng.integers(len(self.ids), size=(200 * many, 3))]
        found, *chance = (int(text[tuple(triples.T)].sum()) for triples in (strongest, uniform, frequent))
        return found, *(count / many for count in chance)


@pytest.fixture(scope="module")
def one_block(plays):
    return OneBlock(plays, seed=1, steps=300)


def test_one_block_is_its_direct_path_and_its_heads(one_block):
    ids = one_block.ids[: 8 * one_block.T].view(8, -1)
    rows = contributions(one_block.model, ids)
    assert list(rows) == ["direct", "biases", "L0H0", "L0H1", "L0H2", "L0H3"]
    assert error(sum(rows.values()), one_block.model(ids)) < 1e-4


def test_the_strongest_skip_trigrams_occur_in_the_text(one_block, record_property):
    """Read from the weights alone; of 512 tokens few random triples occur."""
    strongest, uniform, frequent = one_block.compare()
    record_property("of 200: strongest, random, random by frequency", (strongest, uniform, frequent))
    assert strongest >= 5 * uniform
    assert strongest > frequent


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "steps"), [(2, 300), (3, 300), (1, 1000)])
def test_skip_trigrams_of_other_seeds_and_of_longer_training(plays, seed, steps, record_property):
    strongest, uniform, frequent = OneBlock(plays, seed, steps).compare()
    record_property("of 200: strongest, random, random by frequency", (strongest, uniform, frequent))
    assert strongest >= 5 * uniform
    assert strongest > frequent


V, LONGEST, PERIOD = 32, 24, 20


def repeating(layers, seed):
    """A model trained on rows of random tokens that repeat with a period of 8 to LONGEST, another in each row.

    With one period for all, a head could find what comes next by its position alone.
    """
    config = attention_only(layers, vocab_size=V, n_ctx=2 * PERIOD, d_model=64, n_head=2)
    generator, T = torch.Generator().manual_seed(seed), torch.arange(2 * PERIOD + 1)

    def loss_of(model):
        tokens = torch.randint(V, (32, LONGEST), generator=generator)
        periods = torch.randint(8, LONGEST + 1, (32, 1), generator=generator)
        return next_token_loss(model, tokens.gather(1, T % periods))

    return trained(config, loss_of, steps=400, lr=2e-2, seed=seed)


def second_half_loss(model, silenced):
    """The loss on the second half of repeated tokens with one head of the first block writing nothing."""
    ids = repeated(model.config, PERIOD, sequences=32, seed=1)
    keep = torch.ones(model.config.n_head, 1).index_fill_(0, torch.tensor(silenced), 0.0)
    logits = model(ids, tap=Change({"blocks.0.attn.z": lambda z: z * keep}))
    return F.cross_entropy(logits[:, PERIOD:-1].transpose(1, 2), ids[:, PERIOD + 1 :]).item()


def induction_figures(seed):
    """What the claim is about: induction grows in two blocks, by a head that composition finds, and not in one."""
    model = repeating(2, seed)
    found, H = head_scores(model, period=PERIOD), model.config.n_head
    layer, head = divmod(int(found["induction"].argmax()), H)
    previous = int(found["previous"][0].argmax())
    reads = composition(model).z["K"][:H, layer * H + head]
    gain = found.first_loss - found.second_loss
    control = head_scores(repeating(1, seed), period=PERIOD)
    return {
        "layer": layer,
        "induction": found["induction"].max().item(),
        "second half, of ln V": found.second_loss / math.log(V),
        "previous": found["previous"][0, previous].item(),
        "K composition finds the previous-token head": int(reads.argmax()) == previous,
        "K composition, z": reads.tolist(),
        "undone by silencing it": (second_half_loss(model, previous) - found.second_loss) / gain,
        "one block: induction": control["induction"].max().item(),
        "one block: second half, of ln V": control.second_loss / math.log(V),
    }


def shows(figures):
    """Whether a seed shows the claim."""
    return (
        figures["layer"] == 1
        and figures["induction"] >= 0.5
        and figures["second half, of ln V"] <= 0.3
        and figures["K composition finds the previous-token head"]
        and figures["undone by silencing it"] >= 0.5
        and figures["one block: induction"] <= 0.2
        and figures["one block: second half, of ln V"] >= 0.7
    )


def test_two_blocks_grow_an_induction_head(record_property):
    figures = induction_figures(seed=1)
    record_property("figures", figures)
    assert shows(figures), figures


@pytest.mark.slow
def test_induction_heads_grow_in_two_seeds_of_three(record_property):
    seeds = [induction_figures(seed) for seed in (1, 2, 3)]
    record_property("figures", seeds)
    assert sum(map(shows, seeds)) >= 2, seeds
