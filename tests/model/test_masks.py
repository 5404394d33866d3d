"""Law 6 and padding: what a position may see."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mainstem.config import POSITIONS
from mainstem.errors import ConfigError
from models import ROWS, T, build, configs, error, few, record, small, tokens

PAD = 0


def padded(rows, left):
    """Rows of ids of several lengths, and their mask, both (B, longest)."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), PAD)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for ids_row, mask_row, row in zip(ids, mask, rows, strict=True):
        place = slice(longest - len(row), None) if left else slice(0, len(row))
        ids_row[place], mask_row[place] = row, True
    return ids, mask


def moved(config, t):
    """Logits, (2, B, T, V), before and after token t is changed."""
    model, ids = build(config, torch.float32), tokens(config)
    changed = ids.clone()
    changed[:, t] = (ids[:, t] + 1) % config.vocab_size
    return model(ids), model(changed)


@few
@given(configs(), st.integers(1, T - 1))
def test_a_later_token_moves_nothing_before_it(config, t):
    """Law 6, to the bit."""
    before, after = moved(config, t)
    assert torch.equal(before[:, :t], after[:, :t])


@pytest.mark.parametrize("residual", ROWS)
def test_an_earlier_token_moves_all_that_follows(residual):
    before, after = moved(small(residual), 3)
    assert (before[:, 3:] != after[:, 3:]).any(-1).all()


@few
@given(configs(), st.lists(st.integers(1, T), min_size=2, max_size=4), st.booleans())
def test_a_padded_row_is_the_row_alone(config, lengths, left):
    """Logits and points, padding on either side."""
    model = build(config)
    rows = [tokens(config, 1, length)[0] for length in lengths]
    ids, mask = padded(rows, left)
    together = record(model, ids, mask=mask)
    for index, row in enumerate(rows):
        alone = record(model, row[None])
        for point in ("logits", "resid_final", "blocks.0.resid_mid", "blocks.0.attn.z"):
            if point in alone:
                assert error(together[point][index, mask[index]], alone[point][0]) < 1e-12


@pytest.mark.parametrize("position", POSITIONS)
def test_padding_is_never_read_and_never_nan(position):
    """Rows that begin with padding, one of them nothing else: finite everywhere, gradients too."""
    model = build(small(position=position))
    ids, mask = tokens(model.config, 3), torch.ones(3, T, dtype=torch.bool)
    mask[0, :3] = mask[1] = False
    points = record(model, ids, mask=mask)
    assert not points["blocks.0.attn.pattern"][0, :, 3:, :3].any()
    assert all(value.isfinite().all() for value in points.values())
    points["logits"].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_full_mask_is_no_mask():
    model = build(small())
    ids = tokens(model.config)
    assert error(model(ids, mask=torch.ones_like(ids, dtype=torch.bool)), model(ids)) < 1e-12


def test_more_positions_than_n_ctx_are_refused():
    model = build(small())
    with pytest.raises(ConfigError, match="9 positions do not fit n_ctx 8"):
        model(tokens(model.config, length=9))
