"""Do the tests notice? Each row puts one fault into a copy of the source and runs the tests that should fail.

    python tests/mutations.py [PART ...] [--jobs 2]

With PART only the files whose path holds one of the words. Exits with 1 where fewer than 95 % of the faults are
noticed, and where a row's text is no longer in the source: bring the row up to date with the line that it is about.
"""
# ruff: noqa: E501 (a row shows a line of the source as it stands)

import argparse
import contextlib
import io
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
NEEDED = 0.95
SECONDS = 900

Rows = tuple[tuple[str, str], ...]
FAULTS: tuple[tuple[str, str, Rows], ...] = (
    # file below src/mainstem, tests, (text, what takes its place)
    (
        "model/sublayer.py",
        "model/test_sublayer.py",
        (
            ("f(self.damp(self.ln_in(x, tap)))", "f(self.ln_in(x, tap))"),
            ("self.dropout(self.gain(self.ln_out(write, tap)))", "self.gain(self.dropout(self.ln_out(write, tap)) * 2)"),
            ("self.ln_add(self.skip(x) + touch(", "self.ln_add(x + touch("),
            ("touch(tap, self.write_point, write), tap)", "write, tap)"),
        ),
    ),
    (
        "residuals.py",
        "model/test_sublayer.py model/test_init.py",
        (
            ("skip=(2 * L) ** 0.25", "skip=(2 * L) ** 0.5"),
            ("(8 * L) ** -0.25", "(8 * L) ** -0.5"),
            ("damp=1 / math.sqrt(i + 1)", "damp=1 / math.sqrt(i + 2)"),
            ("i < math.ceil(L / 4)", "i <= math.ceil(L / 4)"),
            ("1 / math.sqrt(2 * depth)", "1 / math.sqrt(depth)"),
        ),
    ),
    (
        "model/attention.py",
        "model/test_reference.py model/test_masks.py model/test_tap.py",
        (
            ("config.attn_scale / (index + 1 if", "config.attn_scale / (index + 2 if"),
            ("base ** (-pairs / d_head)", "base ** (-pairs / (d_head + 1))"),
            ("(a * cos - b * sin, a * sin + b * cos)", "(a * cos + b * sin, b * cos - a * sin)"),
            (
                """        q, k = self.q_norm(q), self.k_norm(k)
        if view.rotation is not None:
            q, k = rotate(q, *view.rotation), rotate(k, *view.rotation)
""",
                """        if view.rotation is not None:
            q, k = rotate(q, *view.rotation), rotate(k, *view.rotation)
        q, k = self.q_norm(q), self.k_norm(k)
""",
            ),
            ("self.q_norm(q), self.k_norm(k)", "self.q_norm(q), self.q_norm(k)"),
            ("dropout_p=dropout, scale=self.scale", "dropout_p=dropout"),
            ("scores = self.scale * (q @", "scores = (q @"),
            (".tril(keys - queries)", ".tril(keys - queries + 1)"),
            ("self.dropout if self.training else 0.0", "self.dropout"),
        ),
    ),
    (
        "model/gpt.py",
        "model/test_reference.py model/test_masks.py model/test_cuts.py model/test_tap.py",
        (
            ("self.config.rope_base, dtype)", "10000.0, dtype)"),
            ("(mask.cumsum(1) - 1).clamp(min=0)", "mask.cumsum(1).clamp(min=0)"),
            ("visible = visible & mask[:, None, None, :] | itself", "visible = visible | itself"),
            ("self.lm_head(self.ln_f(x, tap))", "self.lm_head(x)"),
            ("return self.embd_dropout(x), ", "return x, "),
        ),
    ),
    (
        "model/mlp.py",
        "model/test_formulas.py model/test_reference.py",
        (
            ("gate, up = self.c_fc", "up, gate = self.c_fc"),
            ('"relu2": _relu2', '"relu2": F.relu'),
            ('partial(F.gelu, approximate="tanh")', "F.gelu"),
        ),
    ),
    (
        "model/norms.py",
        "model/test_statistics.py model/test_reference.py",
        (
            ("(variance + self.eps).sqrt()", "variance.sqrt()"),
            ("correction=0, keepdim", "correction=1, keepdim"),
            ("RMSNorm(width, self.eps", "RMSNorm(width, 1e-5"),
        ),
    ),
    (
        "model/init.py",
        "model/test_init.py",
        (
            ("math.sqrt(2 / (fan_in + fan_out))", "math.sqrt(1 / (fan_in + fan_out))"),
            ("{self.seed}:{name}", "1:{name}"),
        ),
    ),
    (
        "model/quantized.py",
        "model/test_quantized.py",
        (("steps.round().clamp", "steps.floor().clamp"), ("weight.abs().amax(1)", "weight.abs().amax()[None]")),
    ),
    (
        "counts.py",
        "test_counts.py",
        (('"training": 3 * forward', '"training": 2 * forward'),),
    ),
    (
        "stream/passage.py",
        "stream/test_decompose.py stream/test_passage.py",
        (
            ("return self.add(self.skip.carry(x))", "return self.add(x)"),
            ("self.gain.carry(self.out.carry(x))", "self.out.carry(x)"),
            ("self._centred(self.weight * u)", "self.weight * self._centred(u)"),
            ("Pulled(self.skip.pull(at_write), at_write)", "Pulled(at_write, at_write)"),
        ),
    ),
    (
        "stream/decompose.py",
        "stream/test_decompose.py",
        (
            ("for head in range(branch.n_head)]\n        yield", "for head in reversed(range(branch.n_head))]\n        yield"),
            ("z if b_V is None else z - b_V", "z"),
            ("labels = [names.neuron(site.block, neuron)", "labels = [names.neuron(site.block, post.shape[2] - 1 - neuron)"),
        ),
    ),
    (
        "stream/attribution.py",
        "stream/test_attribution.py",
        (
            ("weight - head.weight[other]", "weight + head.weight[other]"),
            ('rows.append(("ln_f.bias", direction @ bias))', 'rows.append(("ln_f.bias", 0 * (direction @ bias)))'),
            ("by_block[::-1]", "by_block"),
        ),
    ),
    (
        "stream/record.py",
        "stream/test_capture.py stream/test_points.py",
        (("q, k = (self[f", "k, q = (self[f"), ("T - int(self.mask[row].sum())", "int(self.mask[row].sum())")),
    ),
    (
        "stream/analysis/lens.py",
        "stream/analysis/test_lens.py",
        (
            ("record.ids.long().roll(-1, dims=1)", "record.ids.long().roll(1, dims=1)"),
            ("own.argmax(-1) if followed is None", "own.argmin(-1) if followed is None"),
        ),
    ),
    (
        "stream/analysis/flow.py",
        "stream/analysis/test_flow.py",
        (
            ("weighted if scale is None else weighted / scale[:, None]", "weighted"),
            ("weighted = pattern * lengths[:, :, None]", "weighted = pattern * lengths[:, :, :, None]"),
        ),
    ),
    (
        "stream/change/ablate.py",
        "stream/change/test_ablate.py cli/test_inspect.py",
        (
            ('"mean": mean(other)', '"mean": zero()'),
            ("ablated - base.baseline, base.baseline, how", "base.baseline - ablated, base.baseline, how"),
        ),
    ),
    (
        "stream/change/patch.py",
        "stream/change/test_patch.py cli/test_inspect.py",
        (
            ("return Grid(patched - base.baseline, before,", "return Grid(patched - before, before,"),
            ("(source[target] - trace[target]) * trace.gradient", "(trace[target] - source[target]) * trace.gradient"),
        ),
    ),
    (
        "training/schedule.py",
        "training/test_schedule.py",
        (
            ("(step + 1) / (config.warmup + 1)", "step / (config.warmup + 1)"),
            ("floor + (1 - floor) * 0.5 *", "floor + 0.5 *"),
            ("(1 - done) / config.decay_share", "1 - done / config.decay_share"),
        ),
    ),
    (
        "training/optim.py",
        "training/test_optim.py",
        (
            ("max(1.0, height / width) ** 0.5", "max(1.0, width / height) ** 0.5"),
            ("{id(attn.c_attn.weight): attn.rows for attn in attentions},", "None,"),
            ('p.grad.lerp(momentum, group["momentum"])', "momentum"),
            ('{"params": plain, "weight_decay": 0.0}', '{"params": plain, "weight_decay": config.weight_decay}'),
            ('group["lr"] = peak * rate', 'group["lr"] = peak'),
        ),
    ),
    (
        "training/step.py",
        "training/test_step.py training/test_loop.py",
        (
            ("            with self.device.autocast():\n", "            if True:\n"),
            ("(part / targets).backward()", "(part / part.numel()).backward()"),
            ("        self.optimizer.zero_grad()\n", ""),
        ),
    ),
    (
        "training/evaluate.py",
        "training/test_evaluate.py training/test_step.py",
        (
            ("logits.flatten(0, 1).float()", "logits.flatten(0, 1)"),
            ("ignore_index=IGNORED", "ignore_index=-100"),
            ("with evaluating(model), torch.inference_mode()", "with torch.inference_mode()"),
            ("total / math.log(2) / max(1, size)", "total / max(1, size)"),
        ),
    ),
    (
        "training/vitals.py",
        "training/test_vitals.py",
        (
            ('evaluating(model), torch.compiler.set_stance("force_eager"), device.autocast():\n            loss', "evaluating(model), device.autocast():\n            loss"),
            ("later = pattern[:, :, 1:, 0]", "later = pattern[:, :, :, 0]"),
            ('        with evaluating(model), torch.compiler', "        with torch.compiler"),
        ),
    ),
    (
        "training/loop.py",
        "training/test_step.py training/test_loop.py training/test_allocator.py",
        (
            ("_mix(config.seed, self.done)", "_mix(config.seed, 0)"),
            ("_mix(config.seed, self.done)", "_mix(0, self.done)"),
            ("else allocator.keep_freed)()", "else bool)()"),
            ("is_best = result.loss < self.best", "is_best = result.loss > self.best"),
            ("if not (math.isfinite(loss) and math.isfinite(grad_norm))", "if not math.isfinite(loss)"),
        ),
    ),
    (
        "training/keeper.py",
        "training/test_loop.py",
        (('lambda row: row["step"] < training.done)', 'lambda row: row["step"] <= training.done)'),),
    ),
    (
        "stream/passage.py",
        "stream/test_passage.py stream/test_decompose.py",
        (
            ("return self.over.carry(write)", "return write"),
            ("return self._divided(self._centred(self.weight * u))", "return self._divided(self.weight * self._centred(u))"),
        ),
    ),
    (
        "text/tokens.py",
        "text/test_tokens.py",
        (
            ("self.rows(step * batch_size, batch_size)", "self.rows(step, batch_size)"),
            ("np.random.SeedSequence([self.seed, epoch])", "np.random.SeedSequence([self.seed, 0])"),
            ("rows[:, :-1], rows[:, 1:]", "rows[:, :-1], rows[:, :-1]"),
            ("if rest else [])", "if False else [])"),
            ("ids.max(initial=0) >= vocab_size", "ids.max(initial=0) > vocab_size"),
        ),
    ),
    (
        "text/units.py",
        "text/test_units.py",
        ((".rfind(word)", ".find(word)"), ("unit.first < last and unit.last > first", "unit.first <= last and unit.last > first")),
    ),
    (
        "text/tokenizer.py",
        "text/test_tokenizer.py",
        (
            (r"[\p{L}\p{M}]{0,31}", r"[\p{L}\p{M}]*"),
            ("self._inner.encode_special_tokens = True", "self._inner.encode_special_tokens = False"),
            ("if not 0 <= i < self.vocab_size", "if not i < self.vocab_size"),
        ),
    ),
)  # fmt: skip


class Fault(NamedTuple):
    """One change of the source, and the tests that should notice it."""

    file: str
    tests: list[str]
    old: str
    new: str

    @property
    def name(self) -> str:
        """The file and the line that is changed."""
        return f"{self.file}: {' '.join(self.old.split())} -> {' '.join(self.new.split()) or 'nothing'}"


def faults(words: list[str]) -> Iterator[Fault]:
    """Those of the files that hold one of the words; all without words."""
    for file, tests, rows in FAULTS:
        if not words or any(word in file for word in words):
            yield from (Fault(file, [f"tests/{name}" for name in tests.split()], old, new) for old, new in rows)


def copied(folder: Path) -> Path:
    """A copy of what the tests need."""
    for part in ("src", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("docs", "benchmarks", "examples"):
        (folder / part).symlink_to(ROOT / part)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run(tests: list[str], copy: Path) -> str:
    """What becomes of the tests in a copy, in this process: killed, survived, or why neither."""
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    sys.path.insert(0, str(copy / "src"))
    sys.dont_write_bytecode = False
    signal.signal(signal.SIGALRM, never_ends)
    signal.alarm(SECONDS)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--no-header", *tests])
    outcomes = {0: "survived", 1: "killed"}
    return outcomes.get(int(code), f"pytest left with {code}: {output.getvalue().strip()[-300:]}")


def never_ends(number: int, frame: object) -> None:
    """A test that a fault makes endless fails."""
    raise TimeoutError(f"{SECONDS} seconds")


def tried(fault: Fault, base: Path) -> str:
    """`run` in a copy of the base with a fault in it."""
    with tempfile.TemporaryDirectory() as name:
        copy = shutil.copytree(base, Path(name) / "copy", symlinks=True)
        path = copy / "src" / "mainstem" / fault.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if fault.old not in text:
            return "its text is not in the source any more"
        path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        return run(fault.tests, copy)


def main() -> int:
    """Run every fault, and print a line for each and the share that was killed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="PART")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    every, outcomes = list(faults(arguments.words)), []
    context = multiprocessing.get_context("forkserver")  # each fault has a process of its own, with these at hand
    context.set_forkserver_preload(["numpy", "pytest", "torch"])
    with tempfile.TemporaryDirectory() as name, context.Pool(arguments.jobs, maxtasksperchild=1) as pool:
        base = copied(Path(name))
        sound = pool.apply(run, (sorted({test for fault in every for test in fault.tests}), base))
        if sound != "survived":
            print(f"the tests fail without any fault ({sound}); mend them first")
            return 1
        for fault, outcome in zip(every, pool.imap(partial(tried, base=base), every), strict=True):
            outcomes.append(outcome)
            print(f"{outcome:8}  {fault.name}", flush=True)
    killed = outcomes.count("killed")
    others = [fault.name for fault, outcome in zip(every, outcomes, strict=True) if outcome != "killed"]
    print(f"{killed} of {len(every)} faults killed ({killed / len(every):.0%})", *others, sep="\n  ")
    stale = any(outcome not in ("killed", "survived") for outcome in outcomes)
    return 1 if stale or killed < NEEDED * len(every) else 0


if __name__ == "__main__":
    sys.exit(main())
