"""`load`: any RUN, as a model and its tokenizer."""

from collections.abc import Callable
from pathlib import Path

from mainstem.formats import vocabulary
from mainstem.formats.hf import folder as hf
from mainstem.formats.run import ModelFolder, resolve
from mainstem.model.gpt import GPT
from mainstem.runs import checkpoint
from mainstem.runs.folder import MODEL
from mainstem.text.tokenizer import Tokenizer


def load(
    run: Path | str | ModelFolder, notice: Callable[[str], None] = lambda text: None
) -> tuple[GPT, Tokenizer | None]:
    """Open a RUN: a run folder, a checkpoint, a bundled model's name, or a folder in Hugging Face's GPT-2 layout.

        model, tokenizer = ms.load("runs/demo")

    Nothing in it is executed: weights are safetensors, all else is JSON or text, and nothing is written. The sha256 of
    each file that is read is compared once with the checkpoint's manifest.

    Args:
        run: what to open, or what `resolve` returned for it. Of a run folder it is the best checkpoint if there is one,
            else the last.
        notice: called with a sentence for each damaged checkpoint that is passed over, for weights stored in another
            precision, and for padding.

    Returns the model in evaluation mode, on the CPU, and the tokenizer; None where the folder has none. Raises
    UserError, which names the file, for what is damaged or cannot be represented.
    """
    folder = resolve(run, notice)
    if folder.foreign:
        model, tokenizer = hf.load(folder.path, notice)
    else:
        folder.verify(MODEL)
        model, tokenizer = checkpoint.read_model(folder.path, folder.settings), folder.tokenizer
    if tokenizer is not None:
        vocabulary.check(model.config.vocab_size, tokenizer, folder.name)
        for text in vocabulary.left_out(model.config.vocab_size, tokenizer):
            notice(f"{folder.name}: {text}")
    return model, tokenizer
