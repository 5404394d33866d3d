"""Why did it say that? The logit of the model's answer, split into what each head, MLP and bias adds to it.

python examples/attribution.py bard "O Romeo, Romeo! wherefore art"
"""

import sys

import mainstem as ms
from mainstem.model.names import parse_label


def main(run: str = "bard", prompt: str = "O Romeo, Romeo! wherefore art") -> None:
    """Capture one forward pass, and ask it."""
    model, tokenizer = ms.load(run)
    trace = ms.capture(model, prompt, tokenizer=tokenizer)
    print(trace)

    answer = int(trace.logits[0, -1].argmax())
    print(f"\nafter {prompt!r} the model says {tokenizer.decode([answer])!r}")
    why = trace.attribution(answer)
    print(why)  # rows that sum to the logit
    print("\nhow probable it is when the stream is read at each depth:")
    print(trace.lens(answer))

    strongest = next(row.label for row in why.top(100) if parse_label(row.label).name == "head")
    head = parse_label(strongest)
    pattern = trace["pattern", head.block][0, head.unit, -1]  # (T,), what the last position reads
    pieces = [tokenizer.decode([i]) for i in trace.ids[0].tolist()]
    print(f"\n{strongest}, the strongest head, reads {pieces[int(pattern.argmax())]!r} most ({pattern.max():.2f})")


if __name__ == "__main__":
    main(*sys.argv[1:3])
