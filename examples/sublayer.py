"""Any module as a branch of a residual stream: here a convolution, joined by several rows of the table.

python examples/sublayer.py
"""

import torch
from torch import Tensor, nn

import mainstem as ms

DEPTH, WIDTH = 8, 32


class Convolution(nn.Module):
    """A causal convolution over positions, (B, T, C) -> (B, T, C); it knows nothing of residual streams."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, kernel_size=3)

    def forward(self, x: Tensor) -> Tensor:
        """Reads each position and the two before it."""
        return torch.relu(self.conv(nn.functional.pad(x.transpose(1, 2), (2, 0)))).transpose(1, 2)


def main() -> None:
    """How large the stream is after each of the branches, by the way that they join it."""
    x = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(1))
    print("root mean square of the stream after each branch")
    for residual in ("pre", "post", "sandwich", "rezero", "no_skip_bare"):
        torch.manual_seed(1)
        branches = [ms.Sublayer(Convolution(), WIDTH, residual=residual) for _ in range(DEPTH)]
        stream, sizes = x, []
        for branch in branches:
            stream = branch(stream)
            sizes.append(stream.square().mean().sqrt().item())
        print(f"{residual:<14}" + " ".join(f"{size:6.2f}" for size in sizes))


if __name__ == "__main__":
    main()
