"""Incremental text equals plain decoding, and stop strings do not depend on how text is cut."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sparkinfer.engine.messages import TokenEvent
from sparkinfer.server.choice import Choice
from sparkinfer.server.detokenize import StopMatcher, StreamDetokenizer
from sparkinfer.server.tokenizer import ServerTokenizer

SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
TEXT = st.text(max_size=60) | st.text(alphabet="ab\n é你🙂", max_size=40)


@SHARED
@given(ids=st.lists(st.integers(0, 1023), max_size=60), skip=st.booleans())
def test_pieces_equal_plain_decode(tokenizer: ServerTokenizer, ids: list[int], skip: bool) -> None:
    detokenizer = tokenizer.detokenizer(skip)
    text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert text == tokenizer.backend.decode(ids, skip_special_tokens=skip)


def specials(tokenizer: ServerTokenizer) -> list[AddedToken]:
    return list(tokenizer.backend.get_added_tokens_decoder().values())


@SHARED
@given(text=TEXT)
@example(text="<think>")
def test_real_text_survives_and_is_not_late(tokenizer: ServerTokenizer, text: str) -> None:
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    # Hypothesis tries words of the source too, such as `<think>`: special tokens are not text.
    assume(not any(added.special and added.content in text for added in specials(tokenizer)))
    detokenizer = tokenizer.detokenizer(True)
    released = b""
    for count, token in enumerate(ids, 1):
        released += detokenizer.push(token).encode()
        have = b"".join(map(tokenizer.token_bytes, ids[:count]))
        # At most the bytes of one unfinished character are held.
        assert have.startswith(released)
        assert len(have) - len(released) < 4
    assert released.decode() + detokenizer.flush() == text


def test_long_text_does_not_hold_up_others(tokenizer: ServerTokenizer) -> None:
    text = "some words and 12 numbers, " * 40_000

    async def encode() -> tuple[list[int], int]:
        task = asyncio.ensure_future(tokenizer.encode(text, add_special_tokens=False))
        turns = 0
        while not task.done():
            turns += 1
            await asyncio.sleep(0.001)
        return task.result(), turns

    ids, turns = asyncio.run(encode())
    assert turns > 20
    assert ids == tokenizer.backend.encode(text, add_special_tokens=False).ids


def test_unknown_ids_are_silent(tokenizer: ServerTokenizer) -> None:
    assert tokenizer.detokenizer(True).push(10**6) == ""
    assert tokenizer.token_bytes(10**6) == b""


def expected(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """What a reader sees who gets one character after the other."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], True
    return text, False


@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
@settings(max_examples=1500, deadline=None)
def test_stop_strings_at_any_cut(pieces: list[str], stops: list[str], include: bool) -> None:
    text, stopped = expected("".join(pieces), stops, include)
    matcher = StopMatcher(stops, include)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        assert text.startswith(shown)
    assert (matcher.matched is not None) == stopped
    assert shown + ("" if stopped else matcher.flush()) == text


@pytest.mark.parametrize(
    ("pieces", "stops", "shown"),
    [
        (["hello wor", "ld"], ["world"], ["hello ", ""]),
        (["aab", "aac"], ["aac"], ["aab", ""]),
        (["aaa", "c"], ["aac"], ["a", ""]),
        (["x", "ab", "y"], ["abc"], ["x", "", "aby"]),
    ],
)
def test_only_a_possible_beginning_is_held(pieces: list[str], stops: list[str], shown: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert [matcher.push(piece) for piece in pieces] == shown


def choice_text(choice: Choice, ids: list[int], last: str = "length") -> str:
    text = ""
    for number, token in enumerate(ids, 1):
        text += choice.push(TokenEvent("x", token, last if number == len(ids) else None)).text
        if choice.finish_reason is not None:
            break
    return text


def test_stop_token_is_hidden_unless_asked_for(tokenizer: ServerTokenizer) -> None:
    ids = tokenizer.backend.encode("one two three", add_special_tokens=False).ids
    for include in (False, True):
        choice = Choice(0, [], tokenizer.detokenizer(True), include_stop=include)
        shown = ids if include else ids[:-1]
        assert choice_text(choice, ids, "stop") == tokenizer.decode(shown)
        assert (choice.finish_reason, choice.num_tokens) == ("stop", len(ids))


def test_min_tokens_postpones_stop_strings(tokenizer: ServerTokenizer) -> None:
    ids = tokenizer.backend.encode("a a a a a a", add_special_tokens=False).ids
    choice = Choice(0, [], tokenizer.detokenizer(True), stops=["a"], min_tokens=3)
    assert choice_text(choice, ids) == tokenizer.decode(ids[:3]) + " "
    assert choice.num_tokens == 4


def test_unfinished_character_at_the_end_is_shown(tokenizer: ServerTokenizer) -> None:
    ids = tokenizer.backend.encode("🙂", add_special_tokens=False).ids
    assert len(ids) > 1
    choice = Choice(0, [], tokenizer.detokenizer(True), stops=["zzz"])
    assert choice_text(choice, ids[:-1]) == tokenizer.decode(ids[:-1])


def test_other_tokenizers_stream_too() -> None:
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    stream = StreamDetokenizer(backend, True)
    ids = [1, 2, 2, 1]
    assert "".join(map(stream.push, ids)) + stream.flush() == backend.decode(ids)
