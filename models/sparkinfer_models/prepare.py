"""`train.py prepare`: packages to token streams and a tokenizer, the same bytes on every machine."""

from __future__ import annotations

import collections
from pathlib import Path

from tokenizers import Tokenizer

from sparkinfer_models.chat_samples import chat_samples
from sparkinfer_models.corpus import HELD_OUT_PERCENT, UNSEEN_PACKAGES, Corpus, read_documents, split
from sparkinfer_models.dataset import CHAT_SHARE, encode_stream, stream_texts, write_stream, write_summary
from sparkinfer_models.sources import Document, Source, load_sources
from sparkinfer_models.tokenizer import chat_text, save_tokenizer, train_tokenizer

# Every fifth document is enough to learn merges for a vocabulary of this size.
TOKENIZER_STRIDE = 5
MAX_POSITIONS = 16384


def _bytes_by(documents: list[Document], field: str) -> dict[str, int]:
    counter: collections.Counter[str] = collections.Counter()
    for document in documents:
        counter[getattr(document, field)] += len(document.text.encode())
    return dict(counter)


def _summary(
    corpus: Corpus, sources: list[Source], streams: dict[str, dict[str, int]], doc_siblings: bool
) -> dict[str, object]:
    by_source = _bytes_by(corpus.train, "source")
    return {
        "schema": "sparkinfer/corpus/v1",
        "streams": streams,
        "documents": {"train": len(corpus.train), "held_out": len(corpus.held_out), "unseen": len(corpus.unseen)},
        "dropped_near_duplicates": corpus.dropped_duplicates,
        "train_bytes_by_kind": _bytes_by(corpus.train, "kind"),
        "held_out_percent": HELD_OUT_PERCENT,
        "unseen_packages": list(UNSEEN_PACKAGES),
        "doc_siblings": doc_siblings,
        "sources": [
            {
                "kind": s.kind,
                "name": s.name,
                "version": s.version,
                "licence": s.licence,
                "train_bytes": by_source.get(s.name, 0),
            }
            for s in sources
        ],
    }


def prepare(
    packages: Path, out: Path, tokenizer_file: Path | None = None, doc_siblings: bool = False
) -> dict[str, object]:
    """Builds the corpus from `packages` (fetching what lacks) and writes streams, tokenizer and summary to `out`.

    Streams: `train`, `held_out` (unseen documents), `unseen` (unseen packages), `held_out_chat`.
    `doc_siblings` trains on the manuals of unseen packages, as the shipped models were trained.
    """
    sources = load_sources()
    corpus = split(read_documents(sources, packages), doc_siblings)
    chats, held_chats = chat_samples(corpus.train), chat_samples(corpus.held_out + corpus.unseen)
    if tokenizer_file is None:
        sample = corpus.train[::TOKENIZER_STRIDE]
        tokenizer = train_tokenizer(document.text for document in sample)
    else:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, out / "tokenizer", MAX_POSITIONS)
    texts = {
        "train": stream_texts(corpus.train, chats, CHAT_SHARE),
        "held_out": stream_texts(corpus.held_out, [], 0.0),
        "unseen": stream_texts(corpus.unseen, [], 0.0),
        "held_out_chat": (chat_text(s.question, s.answer) for s in held_chats),
    }
    streams: dict[str, dict[str, int]] = {}
    for name, stream in texts.items():
        ids, size = encode_stream(tokenizer, stream)
        write_stream(out / f"{name}.u16.xz", ids)
        streams[name] = {"tokens": len(ids), "bytes": size}
    summary = _summary(corpus, sources, streams, doc_siblings)
    write_summary(out / "corpus.json", summary)
    return summary
