"""Steering vectors: the difference of mean activations between two sets of texts."""

from typing import TYPE_CHECKING

from torch import Tensor

from mainstem.errors import ConfigError
from mainstem.model.gpt import GPT
from mainstem.stream.capture import capture
from mainstem.stream.change.intervene import Target, locate
from mainstem.stream.ids import Ids

if TYPE_CHECKING:
    from mainstem.text.tokenizer import Tokenizer


def steering_vector(
    model: GPT, positive: Ids, negative: Ids, point: Target, *, tokenizer: "Tokenizer | None" = None
) -> Tensor:
    """The mean activation at the last position of the positive texts, less that of the negative ones.

        vector = ms.steering_vector(model, ["I love thee"], ["I hate thee"], ("resid_post", 1), tokenizer=tokenizer)
        text = ms.generate(model, tokenizer, "ROMEO:", tap=ms.Intervention(model, {("resid_post", 1): ms.add(vector)}))

    Args:
        model: any GPT.
        positive, negative: texts, or rows of ids, of any lengths and numbers.
        point: any target except `pattern`; a point of the stream gives (C,), a head `L1H3` gives (D,).
        tokenizer: required for texts.

    Add it with `Intervention(model, {point: add(vector, scale)})`. Rimsky et al. 2023, Contrastive Activation Addition.
    """
    spot = locate(point, model)
    if spot.of_pattern or spot.pos is not None:
        raise ConfigError(f"point: {point!r} is not a vector at each text's last position; give ('resid_post', 3)")
    sides = (capture(model, ids, [spot.point], tokenizer=tokenizer)[spot.point] for ids in (positive, negative))
    positive_mean, negative_mean = (spot.part(values)[:, -1].mean(0) for values in sides)
    return positive_mean - negative_mean
