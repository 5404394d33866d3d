"""What a join does to the stream: each map beside its transpose, and streams that no row of the table has yet."""

import pytest
import torch

from mainstem.stream import decompose
from mainstem.stream.capture import capture
from mainstem.stream.decompose import UNITS
from mainstem.stream.passage import Identity, Passage, Pulled, RecordedNorm, Scaled, passages
from models import ROWS, build, error, normal, small, tokens

B, T, C = 2, 3, 8
SCALE = 0.5 + normal(B, T, 1).abs()
MAPS = {
    "identity": Identity(),
    "a number": Scaled(1.3),
    "a number for each token": Scaled(normal(B, T, 1)),
    "a number for each channel": Scaled(normal(C)),
    "a number for each token and channel": Scaled(normal(B, T, C)),
    "layernorm": RecordedNorm(normal(C), True, SCALE, normal(C)),
    "rmsnorm": RecordedNorm(normal(C), False, SCALE),
    "a norm without its scale": RecordedNorm(normal(C), True, None),
}


@pytest.mark.parametrize("map", MAPS.values(), ids=MAPS)
def test_pull_is_the_transpose_of_carry(map):
    """<carry(x), u> = <x, pull(u)>, summed over all; and each is linear."""
    x, u = normal(B, T, C).sin(), normal(B, T, C).cos()
    assert error((map.carry(x) * u).sum(), (x * map.pull(u)).sum()) < 1e-12
    assert error(map.carry(2 * x + u), 2 * map.carry(x) + map.carry(u)) < 1e-12


def test_a_recorded_norm_is_the_norm_less_its_bias():
    norm = torch.nn.LayerNorm(C).double()
    with torch.no_grad():
        norm.weight.copy_(normal(C))
        norm.bias.copy_(normal(C).sin())
    x = normal(B, T, C)
    scale = (x.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
    assert error(RecordedNorm(norm.weight, True, scale).carry(x) + norm.bias, norm(x)) < 1e-12


def test_a_factor_of_zero_is_exact_where_the_stream_overflowed():
    assert Scaled(0.0).carry(torch.tensor([float("inf"), 1.0])).tolist() == [0, 0]


@pytest.mark.parametrize("residual", ROWS)
def test_what_was_in_the_stream_and_what_is_added_give_the_stream_after_a_join(residual):
    trace = capture(build(small(residual)), tokens(small(residual)))
    for passage in passages(trace):
        site = passage.site
        after = passage.carry(trace[site.reads]) + passage.add(trace[site.write])
        if passage.constant is not None:
            after = after + passage.constant
        assert error(after, trace[site.after]) < 1e-12


@pytest.mark.parametrize("residual", ROWS)
def test_a_direction_is_pulled_to_the_stream_and_to_the_write(residual):
    trace = capture(build(small(residual)), tokens(small(residual)))
    for passage in passages(trace):
        x, write = trace[passage.site.reads], trace[passage.site.write]
        u = normal(*x.shape)
        pulled = passage.pull(u)
        assert error((x * pulled.stream).sum(), (passage.carry(x) * u).sum()) < 1e-12
        assert error((write * pulled.write).sum(), (passage.add(write) * u).sum()) < 1e-12


class Lanes(Passage):
    """A join of two streams: it writes into both, and mixes them. What is carried is (2, ..., B, T, C)."""

    SHARES = (0.3, 0.7)
    MIX = torch.tensor([[0.8, 0.4], [0.2, 0.6]], dtype=torch.float64)  # columns sum to 1: what both hold together stays

    def carry(self, x):
        return torch.einsum("ij,j...->i...", self.MIX, x)

    def add(self, write):
        return torch.stack([share * write for share in self.SHARES])

    def pull(self, u):
        stream = torch.einsum("ij,i...->j...", self.MIX, u)
        return Pulled(stream, sum(share * part for share, part in zip(self.SHARES, u, strict=True)))


class Enter:
    carry = staticmethod(lambda x: torch.stack([x, torch.zeros_like(x)]))
    pull = staticmethod(lambda u: u[0])


class Together:
    carry = staticmethod(lambda x: x.sum(0))
    pull = staticmethod(lambda u: torch.stack([u, u]))


@pytest.mark.parametrize("by", UNITS)
def test_several_streams_need_other_maps_and_no_other_decomposition(by, monkeypatch):
    """Two lanes that are read together hold the sum of all writes, however it is divided between them."""
    trace = capture(build(small("pre")), tokens(small("pre")))
    plain, directions = trace.decompose(by), normal(2, 12)

    def lanes(record, count=None, positions=slice(None)):
        return (Lanes(record, site, positions) for site in record.model.joins()[:count])

    monkeypatch.setattr(decompose, "passages", lanes)
    monkeypatch.setattr(decompose, "entering", lambda record: Enter)
    monkeypatch.setattr(decompose, "reading", lambda record, point: Together)
    terms, along = trace.decompose(by), trace.project(directions, by)
    assert terms.labels == along.labels == plain.labels
    assert error(terms.values, plain.values) < 1e-12
    assert terms.closing_error < 1e-12
    assert error(along.values, torch.einsum("rbtc,kc->rkbt", plain.values, directions)) < 1e-12
