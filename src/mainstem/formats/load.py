"""`load`: any RUN, as a model and its tokenizer."""

from collections.abc import Callable
from pathlib import Path

from mainstem.formats import vocabulary
from mainstem.formats.hf import folder as hf
from mainstem.formats.run import find, is_foreign
from mainstem.model.gpt import GPT
from mainstem.runs import checkpoint
from mainstem.text.tokenizer import Tokenizer


def load(run: Path | str, notice: Callable[[str], None] = lambda text: None) -> tuple[GPT, Tokenizer | None]:
    """Open a RUN: a run folder, a checkpoint, a bundled model's name, or a folder in Hugging Face's GPT-2 layout.

    Nothing in it is run: weights are safetensors, all else is JSON or text, and nothing is written.

    Args:
        run: what to open. Of a run folder it is the best checkpoint if there is one, else the last.
        notice: told of damaged checkpoints that were passed over, weights stored in another precision, and padding.

    Returns the model in evaluation mode, on the CPU, and the tokenizer; None where the folder has none. Raises
    UserError, which names the file, for what is damaged or cannot be represented.
    """
    place = find(run, notice)
    model, tokenizer = hf.load(place, notice) if is_foreign(place) else checkpoint.load(place)
    if tokenizer is not None:
        vocabulary.check(model.config.vocab_size, tokenizer, run)
        for text in vocabulary.left_out(model.config.vocab_size, tokenizer):
            notice(f"{run}: {text}")
    return model, tokenizer
