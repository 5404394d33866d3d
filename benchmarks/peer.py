"""TransformerLens with our weights in it, so that both sides are asked about one model.

It is an optional extra. Its `TransformerBridge` wraps a GPT-2 of `transformers`, which holds a copy of our weights:
nothing is downloaded, and no tokenizer is needed.
"""

import importlib
import importlib.metadata

import torch
from torch import Tensor

from benchmarks.gpt2 import gpt2, unlike_gpt2
from benchmarks.processes import NotCompared
from mainstem.model.gpt import GPT
from mainstem.stream.decompose import closing_error

PACKAGE = "transformer_lens"
AGREES = 1e-4
"""The largest difference of logits, as a share of the largest logit, at which two models are one."""


class Peer:
    """One of our models in TransformerLens, processed as its documentation has it for looking inside.

    Norms are folded and writes centred, in which form its composition scores and head results are ours; the unembedding
    is left as it is, so that the logits are ours too.

    Args:
        model: any GPT for which `unlike_gpt2` is None. Its weights are copied.

    Raises ImportError if TransformerLens is not installed.
    """

    def __init__(self, model: GPT):
        sources = importlib.import_module(f"{PACKAGE}.model_bridge.sources")
        self.version, theirs = importlib.metadata.version(PACKAGE), gpt2(model, attention="eager").eval()
        self._bridge = sources.build_bridge_from_module(theirs, "GPT2LMHeadModel", hf_config=theirs.config)
        self._bridge.enable_compatibility_mode(disable_warnings=True, center_unembed=False)

    def logits(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, V)."""
        with torch.no_grad():
            return self._bridge(ids)

    def cache(self, ids: Tensor) -> dict[str, Tensor]:
        """Everything that it keeps of one pass by default."""
        with torch.no_grad():
            _, cache = self._bridge.run_with_cache(ids)
        return {name: value for name, value in cache.cache_dict.items() if value is not None}

    def composition(self) -> dict[str, Tensor]:
        """Every score of Q, K and V, (n, n) each, writer by reader; 0 where there is no path."""
        with torch.no_grad():
            return {mode: self._bridge.all_composition_scores(mode).scores.flatten(2).flatten(0, 1) for mode in "QKV"}

    def head_attribution(self, cache: dict[str, Tensor], targets: Tensor) -> Tensor:
        """What every head adds to the logit of each position's target, (n, B, T), from what `cache` returned.

        The cache is not changed, so that every call has the heads' results to compute.
        """
        kept = importlib.import_module(PACKAGE).ActivationCache(dict(cache), self._bridge)
        with torch.no_grad():
            results = kept.stack_head_results(layer=-1, apply_ln=True)  # (n, B, T, C)
            directions = self._bridge.tokens_to_residual_directions(targets)  # (B, T, C)
            return torch.einsum("nbtc,btc->nbt", results, directions)


def find(model: GPT, ids: Tensor) -> tuple[Peer, float]:
    """The model's peer, and the largest difference of its logits for ids (B, T) from ours, as a share of the largest.

    Raises NotCompared if it is not installed, cannot hold the model, or has other logits.
    """
    if field := unlike_gpt2(model.config):
        value = getattr(model.config, field)
        raise NotCompared(
            f"TransformerLens is not compared: {field} {value!r} is not GPT-2's form; take another preset"
        )
    try:
        peer = Peer(model)
    except ImportError as error:
        raise NotCompared(f"TransformerLens is not compared ({error}): pip install 'mainstem[bench]'") from error
    with torch.no_grad():
        difference = closing_error(peer.logits(ids), model(ids))
    if difference > AGREES:
        raise NotCompared(
            f"TransformerLens {peer.version} is not compared: its logits differ from ours by {difference:.1e}"
        )
    return peer, difference
