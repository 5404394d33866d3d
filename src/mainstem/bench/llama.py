"""One of our models in llama.cpp, by llama-cpp-python and gguf (extra `llama`): a GGUF file of architecture gpt2.

The file has no vocabulary, for it is asked with ids and answers with ids.
"""

import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mainstem.model.gpt import GPT

_NAMES = {
    "wte.": "token_embd.", "wpe.": "position_embd.", "ln_f.": "output_norm.", "lm_head.": "output.",
    "blocks.": "blk.", "res_1.ln_in.": "attn_norm.", "res_2.ln_in.": "ffn_norm.", "attn.c_attn.": "attn_qkv.",
    "attn.c_proj.": "attn_output.", "mlp.c_fc.": "ffn_up.", "mlp.c_proj.": "ffn_down.",
}  # fmt: skip


def write(model: GPT, path: Path, kind: str) -> None:
    """Write a model for which `unlike_gpt2` is None; `kind` of its matrices: F32 or Q8_0.

    Raises ImportError if gguf is not installed.
    """
    gguf, config = importlib.import_module("gguf"), model.config
    file = gguf.GGUFWriter(str(path), "gpt2")
    file.add_context_length(config.n_ctx)
    file.add_embedding_length(config.d_model)
    file.add_block_count(config.n_layer)
    file.add_feed_forward_length(config.d_mlp)
    file.add_head_count(config.n_head)
    file.add_layer_norm_eps(config.norm_eps)
    file.add_vocab_size(config.vocab_size)
    file.add_tokenizer_model("no_vocab")
    wanted = gguf.GGMLQuantizationType[kind]
    tensors = {name: parameter.detach().float().numpy() for name, parameter in model.named_parameters()}
    tensors.setdefault("lm_head.weight", tensors["wte.weight"])
    for name, tensor in tensors.items():
        stored = wanted if tensor.ndim == 2 and not name.startswith("wpe.") else gguf.GGMLQuantizationType.F32
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        file.add_tensor(name, gguf.quants.quantize(tensor, stored), raw_dtype=stored)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def generator(path: Path, n_ctx: int) -> Callable[[Sequence[int], int], list[tuple[int, float]]]:
    """A function (prompt, count) -> `count` greedy ids, each with when it came, seconds after it began.

    Raises ImportError if llama-cpp-python is not installed.
    """
    threads = torch.get_num_threads()
    llama = importlib.import_module("llama_cpp").Llama(
        str(path), n_ctx=n_ctx, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def generate(prompt: Sequence[int], count: int) -> list[tuple[int, float]]:
        llama.reset()
        start, came = time.perf_counter(), []
        for i in llama.generate(list(prompt), temp=0.0, reset=True):
            came.append((i, time.perf_counter() - start))
            if len(came) == count:
                break
        return came

    return generate
