"""Make the bundled model from a run: `make bard` trains the run and calls this with it.

Its matrices are stored as int8, and its held-out loss is measured with them and without. The folder that comes with the
package is replaced: src/mainstem/runs/bundled/NAME, with a card, which has the other arguments as sentences of its
own.
"""

import dataclasses
import shutil
import sys
import tempfile
from pathlib import Path

from mainstem.atomic import read_json
from mainstem.errors import RunError, UserError
from mainstem.formats.card import gather, markdown
from mainstem.formats.load import load
from mainstem.formats.run import resolve
from mainstem.model.quantized import quantize
from mainstem.runs import checkpoint, folder
from mainstem.text import tokens
from mainstem.training.evaluate import evaluate

MOST = 6_000_000
"""Bytes of the folder, at most."""
USE = "it is for looking inside, trying commands, and going on with a verse; it is small and knows nothing but its text"
OPENING = ("import mainstem as ms", "", 'model, tokenizer = ms.load("{name}")')


def main(run: str, *more: str) -> None:
    """Quantized the run's best checkpoint, measure it, write folder and card; an old one is replaced by a sound one."""
    opened = resolve(run)
    source, (model, tokenizer) = opened.path, load(opened)
    if tokenizer is None:
        raise RunError(f"{source}: no tokenizer.json; copy the one of {run}/data")
    prepared, int8 = tokens.load(Path(run) / "data"), quantize(model, "int8")
    sizes = tokens.bytes_per_token(tokenizer)
    before, after = (evaluate(each, prepared.val, sizes) for each in (model, int8))
    train, state = opened.settings["train"], read_json(source / checkpoint.STATE)
    name, final = next(iter(folder.BUNDLED.items()))
    notes = [
        "matrices in int8 with one scale a row",
        f"held-out loss with them {after.loss:.4f} nats a token, {after.bits_per_byte:.4f} bits per byte; "
        f"{before.loss:.4f} nats before they were narrowed",
        USE,
        *more,
    ]
    facts = dataclasses.replace(gather(opened, model.config, tokenizer), name=name)
    card = markdown(facts, "mainstem", [line.format(name=name) for line in OPENING], notes)
    with tempfile.TemporaryDirectory() as place:
        made = Path(place) / name
        checkpoint.save(made, int8, tokenizer, train=train, state=state, card=card)
        size = sum(path.stat().st_size for path in made.iterdir())
        if size > MOST:
            raise RunError(f"{run}: {size:,} bytes in int8, more than {MOST:,}; train a smaller model")
        shutil.rmtree(final, ignore_errors=True)
        shutil.copytree(made, final)
    print(card, f"{size:,} bytes", sep="\n")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UserError as error:
        sys.exit(f"{error}")
