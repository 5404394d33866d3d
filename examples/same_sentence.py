"""One model, three programs, one sentence: `python examples/same_sentence.py RUN "ROMEO:"`.

The model is exported for transformers and for llama.cpp, and each goes on with the prompt greedily. A program that is
not installed is left out (`pip install transformers`; `pip install 'mainstem[gguf,llama]'`); at least one has to be.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mainstem as ms
from mainstem.formats import gguf
from mainstem.formats.hf import folder as hf

TOKENS = 40


def say(run: str, prompt: str, place: Path) -> Iterator[tuple[str, str]]:
    """Each program, and what it says; the files are written into `place`."""
    model, tokenizer = ms.load(run)
    count = min(TOKENS, model.config.n_ctx - len(tokenizer.encode(prompt)))  # only ours goes on past the context
    if count < 1:
        sys.exit(f"the prompt fills the context of {model.config.n_ctx} tokens; shorten it")
    yield "mainstem", ms.generate(model, tokenizer, prompt, max_new_tokens=count, sampling=ms.Sampling(temperature=0))
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        pass
    else:
        hf.write(place / "hf", model, tokenizer)
        theirs, words = AutoModelForCausalLM.from_pretrained(place / "hf"), AutoTokenizer.from_pretrained(place / "hf")
        given = words(prompt, return_tensors="pt")
        ids = theirs.generate(**given, max_new_tokens=count, do_sample=False)[0, given.input_ids.shape[1] :]
        yield "transformers", words.decode(ids, skip_special_tokens=True)
    try:
        from llama_cpp import Llama
    except ImportError:
        pass
    else:
        gguf.write(place / "model.gguf", model, tokenizer)
        llama = Llama(str(place / "model.gguf"), n_ctx=model.config.n_ctx, verbose=False)
        answer = llama(prompt, max_tokens=count, temperature=0.0, top_k=1, repeat_penalty=1.0)
        yield "llama.cpp", answer["choices"][0]["text"]
        llama.close()


def main(run: str, prompt: str) -> bool:
    """Print what each says; whether it is the same."""
    with tempfile.TemporaryDirectory() as place:
        said = dict(say(run, prompt, Path(place)))
    for program in ("mainstem", "transformers", "llama.cpp"):
        print(f"{program:<14}{prompt + said[program]!r}" if program in said else f"{program:<14}is not installed")
    same = len(said) > 1 and len(set(said.values())) == 1
    print("the same" if same else "not the same")
    return same


if __name__ == "__main__":
    sys.exit(not main(*sys.argv[1:3]))
