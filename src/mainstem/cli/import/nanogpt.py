"""`mainstem import nanogpt FILE --out RUN --trust-pickle`: a checkpoint of nanoGPT or minGPT, as a RUN."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mainstem import atomic
from mainstem.cli.parts.arguments import Positional, parse
from mainstem.cli.parts.run_summary import finish
from mainstem.cli.parts.screen import Screen
from mainstem.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class NanoGPT:
    """Save a nanoGPT or minGPT checkpoint as a RUN. The file is a pickle: with --trust-pickle, weights and numbers are
    read from it, and anything else in it is refused."""

    file: Positional[str]
    """What torch.save wrote: nanoGPT's ckpt.pt, minGPT's model.pt, or the weights alone."""
    out: str
    """The folder to write; it must not exist yet."""
    trust_pickle: bool = False
    """Read the pickle, and a .pkl given as --tokenizer; only for files whose source you trust."""
    tokenizer: str | None = None
    """The model's tokenizer: nanoGPT's meta.pkl, a tokenizer.json, a RUN, or a folder with vocab.json and
    merges.txt."""
    n_head: int | None = None
    """Attention heads per block, for a file that does not record them."""
    activation: Literal["gelu", "gelu_tanh"] | None = None
    """The MLPs' activation, where the file does not determine it: nanoGPT used gelu_tanh until June 2023 and gelu
    since."""
    json: bool = False
    """One object on stdout."""


def main(argv: Sequence[str]) -> None:
    """Parse, read, save, print."""
    command = parse(NanoGPT, "import nanogpt", argv)
    screen, out = Screen(command.json), atomic.unused(Path(command.out))
    atomic.remove_leftovers(out.parent)
    from mainstem.formats import nanogpt
    from mainstem.formats.run import tokenizer as open_tokenizer
    from mainstem.formats.vocabulary import check
    from mainstem.runs import checkpoint

    trust, name = command.trust_pickle, command.tokenizer
    tokenizer: Tokenizer | None = None
    if name is not None:
        pickled = name.lower().endswith(".pkl")
        tokenizer = nanogpt.read_meta(Path(name), trust_pickle=trust) if pickled else open_tokenizer(name)
    model = nanogpt.read(Path(command.file), trust_pickle=trust, n_head=command.n_head, activation=command.activation)
    if tokenizer is not None:
        check(model.config.vocab_size, tokenizer, command.file)
    checkpoint.save(out, model, tokenizer)
    finish(screen, command.file, command.out, model, tokenizer)
