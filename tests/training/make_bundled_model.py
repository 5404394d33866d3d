"""Make the bundled model from a run: `make bard` trains the run and calls this with it.

Its matrices are stored as int8, and its held-out loss is measured with them and without. The folder that comes with the
package is replaced: src/mainstem/training/bundled/NAME, with a card.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from mainstem.counts import summary
from mainstem.durable import read_json
from mainstem.errors import RunError, UserError
from mainstem.model.quantize import narrow
from mainstem.text import tokens
from mainstem.training import checkpoint, folder
from mainstem.training.evaluate import evaluate

MOST = 6_000_000
"""Bytes of the folder, at most."""
CARD = """# {name}

A GPT in ANDREA's form that comes with mainstem: {n_layer} blocks, {d_model} wide, {n_head} heads, {n_ctx} positions,
byte-level BPE of {vocab_size:,}; {parameters:,} parameters, matrices in int8 with one scale a row.

- Text: the bundled `{sources}` ({licence}); the last tenth was held out.
- Training: `mainstem train --preset {name}`, {steps:,} steps, {tokens:,} tokens, seed {seed}.
- Held-out loss: {int8:.4f} nats a token, {bits:.4f} bits per byte; {fp32:.4f} nats before the weights were narrowed.
- Use: to look inside, to try commands, to continue a line of verse. It is small and knows nothing but these plays.
- Made again by `make {name}`.
"""


def main(run: str) -> None:
    """Narrow the run's best checkpoint, measure it, write folder and card; an old one is replaced by a sound one."""
    source = folder.resolve(run)
    model, tokenizer = checkpoint.load(source)
    if tokenizer is None:
        raise RunError(f"{source}: no tokenizer.json; copy the one of {run}/data")
    prepared, int8 = tokens.load(Path(run) / "data"), narrow(model, "int8")
    sizes = tokens.bytes_per_token(tokenizer)
    before, after = (evaluate(each, prepared.val, sizes) for each in (model, int8))
    train, state = folder.checkpoint_settings(source)["train"], read_json(source / checkpoint.STATE)
    (name, final), said = next(iter(folder.BUNDLED.items())), prepared.passport
    card = CARD.format(
        name=name, **model.config.to_dict(), parameters=summary(model.config)["parameters"]["total"],
        sources=", ".join(str(row["name"]) for row in said["sources"]), licence=said["licence"], **train | state,
        int8=after.loss, bits=after.bits_per_byte, fp32=before.loss,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        made = Path(place) / name
        checkpoint.save(made, int8, tokenizer, train=train, state=state)
        (made / "README.md").write_text(card, encoding="utf-8")
        size = sum(path.stat().st_size for path in made.iterdir())
        if size > MOST:
            raise RunError(f"{run}: {size:,} bytes in int8, more than {MOST:,}; train a smaller model")
        shutil.rmtree(final, ignore_errors=True)
        shutil.copytree(made, final)
    print(card, f"{size:,} bytes", sep="\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except UserError as error:
        sys.exit(f"{error}")
