"""Which heads does an answer need, and where does the difference between two prompts lie?

python examples/ablate_and_patch.py bard
"""

import sys

import mainstem as ms

CLEAN, CORRUPT = "I pray thee, sir, I pray", "I pray you, sir, I pray"


def main(run: str = "bard") -> None:
    """Take out each head; then put the clean prompt's activations into the corrupted one's pass."""
    model, tokenizer = ms.load(run)
    metric = ms.LogitDifference(" thee", " you")  # texts of one token, read by the call's tokenizer

    effects = ms.ablation(model, CLEAN, metric, by="head", how="mean", tokenizer=tokenizer)
    print(effects)
    worst = effects.top(1)[0]
    print(f"without {worst.label} the lead of ' thee' over ' you' changes by {worst.value:+.3f}\n")

    grid = ms.patch_grid(model, CLEAN, CORRUPT, metric, tokenizer=tokenizer)
    print(grid)  # 1 restores all of the difference, 0 none of it
    cell = grid.to_dicts()[0] | {"value": round(grid.to_dicts()[0]["value"], 3)}
    print(f"one of {len(grid.to_dicts())} cells: {cell}\n")

    both = ms.patch(model, CLEAN, CORRUPT, [row.label for row in effects.top(3)], metric, tokenizer=tokenizer)
    print(f"the three strongest heads together restore {both.values.item():+.3f} of the difference")


if __name__ == "__main__":
    main(*sys.argv[1:2])
