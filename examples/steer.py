"""Steering: a direction of the residual stream that stands for a difference between texts, added while it generates.

python examples/steer.py bard
"""

import sys

import mainstem as ms

POSITIVE = ["I love thee", "my sweet love", "O gentle heart", "thy fair beauty"]
NEGATIVE = ["I hate thee", "my foul foe", "O bloody death", "thy dark murder"]


def main(run: str = "bard", prompt: str = "ROMEO:\n") -> None:
    """The same prompt and seed with the direction, without it, and with its opposite."""
    model, tokenizer = ms.load(run)
    point = ("resid_post", 1)
    vector = ms.steering_vector(model, POSITIVE, NEGATIVE, point, tokenizer=tokenizer)  # (C,)
    print(f"the direction has length {vector.norm():.2f}")
    for scale in (-2.0, 0.0, 2.0):
        tap = ms.Intervention(model, {point: ms.add(vector, scale)})
        text = ms.generate(model, tokenizer, prompt, max_new_tokens=30, seed=1, tap=tap)
        print(f"\nscale {scale:+.0f}\n{prompt}{text}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
