from collections.abc import Callable, Iterator

import pytest
import torch
from filelock import FileLock

from mainstem.config import ModelConfig
from mainstem.generation.compiled import store
from mainstem.model.gpt import GPT


@pytest.fixture(scope="session")
def lively() -> Callable[..., GPT]:
    """Makes a model whose every parameter matters: an untrained one says the same token for ever."""

    def make(dtype: torch.dtype = torch.float64, seed: int = 1, **fields) -> GPT:
        shape = {"vocab_size": 97, "n_ctx": 12, "n_layer": 2, "n_head": 2, "d_model": 16, "tie_embeddings": False}
        model = GPT(ModelConfig(**(shape | fields))).to(dtype)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
                if parameter.dim() < 2:  # norms, biases, gains
                    parameter.add_(noise, alpha=0.3)
                else:
                    parameter.copy_(noise * (1.0 if parameter is model.wte.weight else 2 * parameter.shape[1] ** -0.5))
        return model.eval()

    return make


@pytest.fixture(scope="module")
def compiled_step(request: pytest.FixtureRequest) -> Iterator[None]:
    """The compiled step lies in the cache folder, which is pytest's own, so that it is compiled once."""
    pytest.importorskip("numba", reason="the compiled step needs numba: pip install mainstem[fast]")
    folder = request.config.cache.mkdir("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        with FileLock(folder / "worker.lock"):  # the other workers of pytest-xdist wait for the first
            store.build()
        store._load.cache_clear()
        assert store.load("fp32") is not None
        yield
    store._load.cache_clear()
