"""Token files that can be trusted, and an order of batches that only (seed, step) decides."""

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstem.errors import DataError
from mainstem.text import encode, tokenizer, tokens
from mainstem.text.corpus import Source
from mainstem.text.tokenizer import Bytes, Characters
from mainstem.text.tokens import Windows, bytes_per_token, evaluation_windows, prepare

STORY = "the cat sat on the mat. 대한민국은 민주공화국이다!\n" * 40


@pytest.fixture
def story(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text(STORY, "utf-8")
    return path


def prepared_from(tmp_path, text, **options):
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    return prepare(Source((path,)), tmp_path / "out", **options)


def test_a_folder_holds_the_text_and_its_passport(story, tmp_path):
    made = prepare(Source((story,)), tmp_path / "out", vocab_size=290)
    everything = np.concatenate([made.train, made.val])
    assert made.tokenizer.decode(everything) == STORY
    assert everything[-1] == made.tokenizer.eot_id == 289
    assert sum(bytes_per_token(made.tokenizer)[everything]) == len(STORY.encode())
    said = json.loads((tmp_path / "out" / "passport.json").read_text("utf-8"))
    assert said == made.passport
    assert said["format"] == "mainstem-data/1"
    assert said["sources"] == Source((story,)).fingerprints()
    assert said["counts"]["tokens"] == len(everything)
    assert said["split"] == len(everything) - len(everything) // 10 == len(made.train)
    assert said["tokenizer"] == {
        "kind": "bpe", "vocab_size": 290, "asked_vocab_size": 290, "sha256": made.tokenizer.hash
    }  # fmt: skip
    assert said["files"]["tokens.bin"]["bytes"] == 2 * len(everything)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "story.txt"]
    assert made.notes() == []


def test_documents_are_joined_by_end_of_text(tmp_path):
    rows = ["one", "", "둘", "x"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows), "utf-8")
    made = prepare(Source((tmp_path / "a.jsonl",)), tmp_path / "out", kind="byte")
    expected = [*b"one", 256, *"둘".encode(), 256, *b"x", 256]
    assert [*made.train, *made.val] == expected
    assert made.passport["counts"]["documents"] == 3
    assert made.notes() == ["1 empty document(s) were skipped"]


def test_entropy_is_that_of_the_ids(tmp_path):
    assert prepared_from(tmp_path, "aab", kind="byte").passport["token_entropy"] == pytest.approx(1.0397207708)


@pytest.mark.parametrize("kind", tokenizer.KINDS)
def test_many_short_documents_lose_nothing(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 1000)
    lines = [f"document {i} 입니다" for i in range(1000)]
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(lines), "utf-8")
    made = prepare(Source((path,), separator="\n"), tmp_path / "out", kind=kind)
    assert made.passport["counts"]["documents"] == 1000
    assert made.tokenizer.decode([*made.train, *made.val]) == "".join(lines)


def test_a_text_of_its_own_validates(story, tmp_path):
    (tmp_path / "val.txt").write_text("the cat", "utf-8")
    progress = []
    made = prepare(
        Source((story,)), tmp_path / "out", kind="byte", val=Source((tmp_path / "val.txt",)),
        progress=lambda done, total: progress.append((done, total)),
    )  # fmt: skip
    assert list(made.val) == [*b"the cat", 256]
    assert list(made.train) == [*STORY.encode(), 256]
    assert made.passport["split"] is None
    assert progress[-1] == (len(STORY.encode()) + 7,) * 2
    assert progress == sorted(progress)


def test_the_tokenizer_does_not_see_the_held_out_tenth(tmp_path):
    made = prepared_from(tmp_path, "ab" * 450 + "yz" * 50, vocab_size=260)
    assert made.passport["tokenizer_sample_bytes"] == 900
    assert all(b"y" not in token for token in made.tokenizer.token_bytes if len(token) > 1)


def test_the_sample_is_bounded_and_spread(tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "SAMPLE_BYTES", 30_000)
    monkeypatch.setattr("mainstem.text.corpus.PIECE_CHARACTERS", 1_000)
    text = "".join(f"{i // 1000:03d} " for i in range(100_000))
    made = prepared_from(tmp_path, text, vocab_size=400)
    assert 29_000 < made.passport["tokenizer_sample_bytes"] <= 31_000
    said = []
    seen = "".join(encode._sample(Source((tmp_path / "text.txt",)), 10, lambda: None, said.append)).split()
    assert said == [True]
    assert {int(number) // 10 for number in seen if len(number) == 3} == set(range(9))
    assert f"a sample of {made.passport['tokenizer_sample_bytes']:,} bytes" in made.notes()[-1]


@pytest.mark.parametrize(("limit", "sampled"), [(60_000, True), (90_000, False)])
def test_a_sample_is_said_whenever_there_is_one(tmp_path, monkeypatch, limit, sampled):
    """Of 100,000 bytes nine tenths may be seen."""
    monkeypatch.setattr(encode, "SAMPLE_BYTES", limit)
    made = prepared_from(tmp_path, "".join(f"{i // 250:04d}\n" for i in range(20_000)), vocab_size=300)
    assert made.passport["tokenizer_sampled"] is sampled
    assert any("a sample of" in note for note in made.notes()) is sampled


def test_unspaced_text_is_sampled_for_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "UNSPACED_SAMPLE_BYTES", 5_000)
    monkeypatch.setattr("mainstem.text.corpus.PIECE_CHARACTERS", 500)
    monkeypatch.setattr("mainstem.text.corpus.RUN_CHARACTERS", 500)
    text = "".join(random.Random(1).choices([chr(0xAC00 + i) for i in range(2000)], k=20_000))
    assert prepared_from(tmp_path, text, vocab_size=300).passport["tokenizer_sample_bytes"] < 8_000


def test_a_short_text_says_how_far_its_vocabulary_reached(tmp_path):
    made = prepared_from(tmp_path, "abc\r\nd\r" * 2, vocab_size=4000)
    reached = made.tokenizer.vocab_size
    assert made.notes() == [
        f"the vocabulary has {reached} tokens, not the requested 4,000",
        "2 CRLF and 2 lone CR line ends were kept (`newlines` lf converts them)",
    ]


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"])
def test_an_empty_file_is_named_and_leaves_nothing(content, tmp_path):
    (tmp_path / "empty.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"empty\.txt: no text"):
        prepare(Source((tmp_path / "empty.txt",)), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


def test_an_alphabet_that_does_not_fit_is_refused(story, tmp_path):
    with pytest.raises(DataError, match=r"story\.txt: 30\.8% .* such as '공', '국', '다'.* bpe or byte"):
        prepare(Source((story,)), tmp_path / "out", tokenizer=Characters("\n !.acehmnost"))
    assert not (tmp_path / "out").exists()


def test_without_an_end_of_text_nothing_stands_between_documents(tmp_path):
    (tmp_path / "docs.jsonl").write_text('{"text": "abab"}\n{"text": "baba"}\n' * 20, "utf-8")
    made = prepare(Source((tmp_path / "docs.jsonl",)), tmp_path / "out", tokenizer=Characters("ab", end_of_text=False))
    assert made.tokenizer.decode([*made.train, *made.val]) == "ababbaba" * 20
    assert "nothing separates the 40 documents" in made.notes()[0]


def test_rare_unknown_characters_are_dropped_and_counted(tmp_path):
    made = prepared_from(tmp_path, "ab" * 100 + "가", tokenizer=Characters("ab"))
    assert made.tokenizer.decode([*made.train, *made.val]) == "ab" * 100
    assert made.passport["counts"]["unknown"] == made.passport["counts"]["dropped"] == 1
    assert "1 character(s) unknown to the tokenizer were dropped (0.498%)" in made.notes()


def test_what_the_validation_text_lost_is_said_too(story, tmp_path):
    (tmp_path / "val.txt").write_text("cat " * 100 + "Z", "utf-8")
    made = prepare(Source((story,)), tmp_path / "out", kind="char", val=Source((tmp_path / "val.txt",)))
    assert made.passport["validation_counts"]["unknown"] == 1
    assert made.notes()[0].startswith("1 character(s) unknown to the tokenizer")


def test_the_same_request_is_answered_from_the_folder(story, tmp_path):
    prepare(Source((story,)), tmp_path / "out", vocab_size=300)
    before = (tmp_path / "out" / "tokens.bin").stat().st_ino
    prepare(Source((story,)), tmp_path / "out", vocab_size=300)
    assert (tmp_path / "out" / "tokens.bin").stat().st_ino == before


def test_an_edited_text_is_prepared_again(story, tmp_path):
    prepare(Source((story,)), tmp_path / "out", kind="byte")
    story.write_text(STORY.replace("cat", "dog"), "utf-8")
    made = prepare(Source((story,)), tmp_path / "out", kind="byte")
    assert "dog" in made.tokenizer.decode(made.train)


@pytest.mark.parametrize("options", [{"vocab_size": 301}, {"kind": "byte"}, {"tokenizer": Bytes()}])
def test_another_request_is_prepared_again(options, story, tmp_path):
    prepare(Source((story,)), tmp_path / "out", vocab_size=300)
    assert prepare(Source((story,)), tmp_path / "out", **options).tokenizer.vocab_size != 300


def test_a_damaged_folder_is_prepared_again(story, tmp_path):
    good = prepare(Source((story,)), tmp_path / "out", kind="byte").train.tolist()
    raw = bytearray((tmp_path / "out" / "tokens.bin").read_bytes())
    raw[0] ^= 1
    (tmp_path / "out" / "tokens.bin").write_bytes(raw)
    assert prepare(Source((story,)), tmp_path / "out", kind="byte").train.tolist() == good


def test_a_folder_of_other_things_is_refused(story, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.doc").write_text("mine")
    with pytest.raises(DataError, match=r"holds other files \(thesis\.doc\)"):
        prepare(Source((story,)), tmp_path / "out")
    assert (tmp_path / "out" / "thesis.doc").read_text() == "mine"


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_a_stop_leaves_nothing_behind(calls, story, tmp_path):
    left = [None] * calls

    def stop():
        if not left:
            raise KeyboardInterrupt
        left.pop()

    with pytest.raises(KeyboardInterrupt):
        prepare(Source((story,)), tmp_path / "out", vocab_size=300, should_stop=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["story.txt"]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda out: (out / "tokens.bin").unlink(), r"tokens\.bin: No such file"),
        (lambda out: (out / "tokens.bin").write_bytes(b"12"), r"tokens\.bin: 2 bytes, not"),
        (lambda out: (out / "tokenizer.json").unlink(), r"tokenizer\.json: No such file"),
        (lambda out: (out / "passport.json").unlink(), "no prepared text"),
        (lambda out: (out / "passport.json").write_text("{"), r"passport\.json.*damaged"),
        (lambda out: (out / "passport.json").write_text("[]"), r"passport\.json.*damaged"),
        (lambda out: (out / "passport.json").write_text('{"format": "x/2"}'), "'x/2' is not 'mainstem-data/1'"),
    ],
)
def test_a_harmed_folder_is_refused(harm, said, story, tmp_path):
    prepare(Source((story,)), tmp_path / "out", kind="byte")
    harm(tmp_path / "out")
    with pytest.raises(DataError, match=said):
        tokens.load(tmp_path / "out")


def test_another_tokenizer_and_a_flipped_bit_are_found(story, tmp_path):
    out = tmp_path / "out"
    prepare(Source((story,)), out, kind="char")
    raw = bytearray((out / "tokens.bin").read_bytes())
    raw[7] ^= 1
    (out / "tokens.bin").write_bytes(raw)
    tokens.load(out)
    with pytest.raises(DataError, match=r"tokens\.bin: its sha256"):
        tokens.load(out, verify=True)
    text = (out / "tokenizer.json").read_text("utf-8")
    (out / "tokenizer.json").write_text(text.replace("abc", "bac").replace("c", "z", 1), "utf-8")
    with pytest.raises(DataError, match=r"tokenizer\.json: "):
        tokens.load(out)


def test_ids_above_uint16_survive(tmp_path):
    letters = "".join(map(chr, [*range(0x4E00, 0x9FFF), *range(0xAC00, 0xD7A4), *range(0x10000, 0x19000)]))
    made = prepared_from(tmp_path, letters[-1] + letters[0], tokenizer=Characters(letters))
    assert made.passport["dtype"] == "uint32"
    assert [*made.train, *made.val] == [len(letters) - 1, 0, len(letters)]
    assert len(letters) > 1 << 16


@given(st.integers(2, 9), st.integers(0, 60), st.integers(0, 3))
def test_windows_cover_an_epoch_once(n_ctx, extra, seed):
    stream = np.arange(n_ctx + 1 + extra, dtype=np.uint16)
    windows = Windows(stream, n_ctx, seed, len(stream))
    for epoch in range(3):
        rows = windows.rows(epoch * windows.per_epoch, windows.per_epoch)
        assert (np.diff(rows, axis=1) == 1).all()
        targets = np.sort(rows[:, 1:].ravel())
        assert (np.diff(targets) == 1).all()  # each target once, without a gap
        assert len(targets) > len(stream) - 2 * n_ctx - 1


def test_windows_are_a_function_of_seed_and_index():
    stream = np.arange(1000, dtype=np.uint16)
    windows = Windows(stream, 8, 7, 1000)
    assert windows.per_epoch == 124
    everything = windows.rows(0, 400)
    for first, count in [(390, 10), (0, 1), (120, 9), (123, 2), (5, 0)]:
        assert (windows.rows(first, count) == everything[first : first + count]).all()
        assert (Windows(stream, 8, 7, 1000).rows(first, count) == everything[first : first + count]).all()
    x, y = windows.batch(3, 16)
    assert x.dtype == y.dtype == np.int64
    assert (x == everything[48:64, :-1]).all()
    assert (y == everything[48:64, 1:]).all()
    assert (Windows(stream, 8, 8, 1000).rows(0, 400) != everything).any()
    assert everything[:4, 0].tolist() == [415, 303, 519, 687]  # a change here would break every resumed run


def test_offsets_differ_between_epochs():
    windows = Windows(np.arange(800, dtype=np.uint16), 8, 0, 800)
    offsets = {windows.rows(epoch * windows.per_epoch, 1)[0, 0] % 8 for epoch in range(40)}
    assert offsets == set(range(8))


def test_too_few_tokens_are_counted():
    with pytest.raises(DataError, match=r"text\.bin: 20 tokens.* 33 .*`n_ctx`"):
        Windows(np.zeros(20, np.uint16), 32, 0, 5, "text.bin")
    assert Windows(np.zeros(33, np.uint16), 32, 0, 5).per_epoch == 1


def test_an_id_outside_the_vocabulary_is_found():
    stream = np.array([0, 1, 70000, 1], np.uint32)
    with pytest.raises(DataError, match=r"here\.bin: token id 70000 .* 257"):
        Windows(stream, 3, 0, 257, "here.bin").rows(0, 1)
    with pytest.raises(DataError, match=r"here\.bin: token id 70000 .* 257"):
        list(evaluation_windows(stream, 3, 1, vocab_size=257, name="here.bin"))


def test_five_gigabytes_are_addressed(tmp_path):
    path = tmp_path / "tokens.bin"
    size = 5 << 30
    with open(path, "wb") as file:
        file.truncate(size)  # sparse
        file.seek(size - 8)
        file.write(np.array([1, 2, 3, 4], "<u2").tobytes())
    stream = np.memmap(path, dtype="<u2", mode="r")
    windows = Windows(stream[-(1 << 10) :], 3, 0, 5)
    assert windows.rows(0, windows.per_epoch).max() >= 3
    huge = Windows(stream, 1 << 20, 0, 5)
    assert huge.per_epoch == (size // 2 >> 20) - 1
    starts = {huge._start(i) for i in range(huge.per_epoch)}
    assert max(starts) > 1 << 31
    x, _ = next(evaluation_windows(stream[-5:], 8, 4))
    assert x.tolist() == [[0, 1, 2, 3]]


@given(st.integers(2, 70), st.integers(1, 9), st.integers(1, 5))
def test_every_token_but_the_first_is_a_target_once(size, n_ctx, batch_size):
    batches = list(evaluation_windows(np.arange(size, dtype=np.uint16), n_ctx, batch_size))
    assert np.concatenate([y.ravel() for _, y in batches]).tolist() == list(range(1, size))
    assert np.concatenate([x.ravel() for x, _ in batches]).tolist() == list(range(size - 1))
    assert all(x.shape == y.shape and len(x) <= batch_size and x.dtype == np.int64 for x, y in batches)
    assert all(x.shape[1] == n_ctx for x, _ in batches[:-1])


def test_one_token_cannot_be_evaluated():
    with pytest.raises(DataError, match=r"val\.bin: 1 tokens"):
        list(evaluation_windows(np.zeros(1, np.uint16), 8, 2, name="val.bin"))


def test_bytes_are_counted_raw():
    each = tokenizer.train("char", ["a가👍"])
    assert bytes_per_token(each).tolist() == [1, 3, 4, 0]
    assert bytes_per_token(each).dtype == np.int64


def test_the_first_id_past_the_vocabulary_is_outside_it():
    stream = np.array([0, 1, 256, 2, 3, 257, 4, 5, 6], np.uint16)
    assert len(list(evaluation_windows(stream, 3, 1, vocab_size=258))) > 0
    with pytest.raises(DataError, match="token id 257 is outside the vocabulary of 257"):
        list(evaluation_windows(stream, 3, 1, vocab_size=257))
