"""What is taken from packages, how it is split, and that chat samples look as the chat template renders them."""

from __future__ import annotations

import io
import lzma
import tarfile
import zipfile
from pathlib import Path

import pytest
from sparkinfer_models.chat_samples import chat_samples
from sparkinfer_models.corpus import drop_near_duplicates, is_held_out, split
from sparkinfer_models.sources import Document, Source, classify, documents, fetch, load_sources, readable
from sparkinfer_models.tokenizer import MASK_ID, chat_text, save_tokenizer, train_tokenizer
from transformers import AutoTokenizer

from sparkinfer.errors import ConfigError

FUNCTION = '''
def area(width, height):
    """Return the area of a rectangle with these sides."""
    if width < 0 or height < 0:
        raise ValueError("sides must not be negative")
    return width * height
'''


def _text(tag: str) -> str:
    return "\n".join(f"this is line {i} of the document that is called {tag}" for i in range(20)) + "\n"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("pkg/core.py", "python"),
        ("pkg/tests/test_core.py", None),
        ("pkg/_vendor/core.py", None),
        ("pkg/data.bin", None),
        ("pkg-1.0.dist-info/licenses/LICENSE", "prose"),
        ("usr/share/doc/x/html/_sources/a.rst.txt", "prose"),
        ("usr/share/doc/x/changelog.txt.gz", None),
        ("usr/share/dict/american-english", "words"),
        ("usr/share/common-licenses/GPL-2", "prose"),
    ],
)
def test_classify(path: str, kind: str | None) -> None:
    assert classify(path) == kind


def test_readable_refuses_what_no_person_wrote() -> None:
    assert readable(_text("a"))
    assert not readable("short")
    assert not readable("0123456789, " * 200)
    assert not readable(_text("a") + "x" * 500)
    assert not readable(_text("ünï" * 5))
    assert not readable(_text("a") + "<|im_start|>user\n")


def test_wheel_and_deb_are_read_up_to_the_cap(tmp_path: Path) -> None:
    wheel = tmp_path / "pkg.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in "abc":
            archive.writestr(f"pkg/{name}.py", _text(name))
    size = len(_text("a"))
    source = Source("pypi", "pkg", "1", "pkg.whl", "", "MIT", cap_bytes=2 * size + 10)
    assert len(list(documents(source, wheel))) == 2
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        body = _text("deb").encode()
        info = tarfile.TarInfo("./usr/share/doc/x/guide.txt")
        info.size = len(body)
        tar.addfile(info, io.BytesIO(body))
    data = lzma.compress(buffer.getvalue())
    members = b"".join(
        name.ljust(16).encode() + b" " * 32 + str(len(raw)).ljust(10).encode() + b"`\n" + raw + b"\n" * (len(raw) % 2)
        for name, raw in (("debian-binary", b"2.0\n"), ("data.tar.xz", data))
    )
    deb = tmp_path / "x.deb"
    deb.write_bytes(b"!<arch>\n" + members)
    found = list(documents(Source("deb", "x", "1", "x.deb", "", "GPL-2.0", 10**6), deb))
    assert [(d.path, d.kind, d.text) for d in found] == [("x/usr/share/doc/x/guide.txt", "prose", _text("deb"))]


def test_a_file_with_another_digest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pkg.whl").write_bytes(b"something else")
    with pytest.raises(ConfigError, match="the manifest says 00"):
        fetch(Source("pypi", "pkg", "1", "pkg.whl", "00", "MIT", 1), tmp_path)


def test_manifest_names_version_licence_and_digest_of_every_source() -> None:
    sources = load_sources()
    assert len(sources) > 100
    assert len({s.file for s in sources}) == len(sources)
    for source in sources:
        assert source.version
        assert source.licence not in ("", "?")
        assert len(source.sha256) == 64


def test_near_duplicates_are_dropped_before_the_split() -> None:
    copy = Document("b", "b/copy.py", "python", _text("one") + "one more line, so that the files are not equal\n")
    kept, dropped = drop_near_duplicates([Document("a", "a/one.py", "python", _text("one")), copy])
    assert (len(kept), dropped) == (1, 1)


def test_split_is_by_document_and_by_package() -> None:
    rows = [Document("p", f"p/{i}.py", "python", _text(f"document {i}")) for i in range(600)]
    rows += [Document("bottle", "bottle/bottle.py", "python", _text("bottle"))]
    corpus = split(rows)
    assert [d.path for d in corpus.unseen] == ["bottle/bottle.py"]
    # The manual of an unseen package renders its docstrings.
    manual = Document("python-werkzeug-doc", "python-werkzeug-doc/x.rst", "prose", _text("manual"))
    other = Document("python-flask-doc", "python-flask-doc/x.rst", "prose", _text("another"))
    assert [d.source for d in split([manual, other]).unseen] == ["python-werkzeug-doc"]
    assert not split([manual, other], doc_siblings=True).unseen
    assert 1 <= len(corpus.held_out) <= 30
    assert not {d.path for d in corpus.train} & {d.path for d in corpus.held_out}
    assert all(is_held_out(d.path) for d in corpus.held_out)


def test_chat_samples_are_rendered_as_the_template_renders_them(tmp_path: Path) -> None:
    rows = [Document("p", f"p/{i}.py", "python", FUNCTION.replace("def area", f"def area_{i}")) for i in range(8)]
    samples = chat_samples(rows)
    assert len(samples) == 8
    written = [s for s in samples if s.answer.startswith("```python\ndef area_")]
    explained = [s for s in samples if s.answer == "Return the area of a rectangle with these sides."]
    assert written
    assert explained
    assert all('"""' not in s.question for s in explained)
    texts = [chat_text(s.question, s.answer) for s in samples]
    save_tokenizer(train_tokenizer([FUNCTION, *texts], 400), tmp_path, 128)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.convert_tokens_to_ids("<|mask|>") == MASK_ID
    for sample, text in zip(samples, texts, strict=True):
        messages = [{"role": "user", "content": sample.question}, {"role": "assistant", "content": sample.answer}]
        assert tokenizer.apply_chat_template(messages, tokenize=False) == text
        prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        assert text == prompt + sample.answer + "<|im_end|>\n"
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
