"""Compare the output of one model in three programs: `python examples/same_sentence.py RUN "ROMEO:"`.

The model is exported for transformers and for llama.cpp, and each completes the prompt greedily. A program that is not
installed is skipped (`pip install transformers`; `pip install 'mainstem[gguf,llama]'`); at least one has to be.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mainstem as ms
from mainstem.formats import gguf
from mainstem.formats.hf import folder as hf_folder

TOKENS = 40


def continuations(run: str, prompt: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Each program, and its continuation; the files are written into `folder`."""
    model, tokenizer = ms.load(run)
    count = min(TOKENS, model.config.n_ctx - len(tokenizer.encode(prompt)))  # only mainstem generates past the context
    if count < 1:
        sys.exit(f"the prompt fills the context of {model.config.n_ctx} tokens; shorten it")
    yield "mainstem", ms.generate(model, tokenizer, prompt, max_new_tokens=count, temperature=0)
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        pass
    else:
        hf_folder.write(folder / "hf", model, tokenizer)
        other, words = AutoModelForCausalLM.from_pretrained(folder / "hf"), AutoTokenizer.from_pretrained(folder / "hf")
        inputs = words(prompt, return_tensors="pt")
        ids = other.generate(**inputs, max_new_tokens=count, do_sample=False)[0, inputs.input_ids.shape[1] :]
        yield "transformers", words.decode(ids, skip_special_tokens=True)
    try:
        from llama_cpp import Llama
    except ImportError:
        pass
    else:
        gguf.write(folder / "model.gguf", model, tokenizer)
        llama = Llama(str(folder / "model.gguf"), n_ctx=model.config.n_ctx, verbose=False)
        answer = llama(prompt, max_tokens=count, temperature=0.0, top_k=1, repeat_penalty=1.0)
        yield "llama.cpp", answer["choices"][0]["text"]
        llama.close()


def main(run: str, prompt: str) -> bool:
    """Print what each says; whether it is the same."""
    with tempfile.TemporaryDirectory() as folder:
        texts = dict(continuations(run, prompt, Path(folder)))
    for program in ("mainstem", "transformers", "llama.cpp"):
        print(f"{program:<14}{prompt + texts[program]!r}" if program in texts else f"{program:<14}is not installed")
    same = len(texts) > 1 and len(set(texts.values())) == 1
    print("the same" if same else "not the same")
    return same


if __name__ == "__main__":
    sys.exit(not main(*sys.argv[1:3]))
