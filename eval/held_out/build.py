"""Make the held-out set of this folder again: `python eval/held_out/build.py --data DATA --packages FOLDER`.

DATA is the folder that `models/train.py prepare` wrote: only documents in its `unseen` stream are taken, modules of
packages that were left out of the training text (SOURCES.md says what of them the shipped models saw all the same).
FOLDER is where the packages are, or are fetched to.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "models")]

from sparkinfer_models.chat_samples import chat_samples  # noqa: E402
from sparkinfer_models.corpus import UNSEEN_PACKAGES  # noqa: E402
from sparkinfer_models.dataset import read_stream  # noqa: E402
from sparkinfer_models.sources import Document, documents, fetch, is_licence, load_sources  # noqa: E402
from sparkinfer_models.tokenizer import END_OF_TEXT_ID  # noqa: E402

TEXTS, TEXT_CHARACTERS = 24, 2400
LONG_TEXTS, LONG_CHARACTERS = 2, 14000
CHATS = 12


def unseen_texts(data: Path) -> set[str]:
    """The documents of the `unseen` stream, decoded."""
    tokenizer = Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
    ids = read_stream(data / "unseen.u16.xz")
    texts, start = set(), 0
    for end in np.flatnonzero(ids == END_OF_TEXT_ID).tolist():
        texts.add(tokenizer.decode(ids[start:end].tolist(), skip_special_tokens=False))
        start = end + 1
    return texts


def cut(text: str, characters: int) -> str:
    """The beginning of a text, up to the last whole line."""
    return text if len(text) <= characters else text[: text.rindex("\n", 0, characters) + 1]


def entries(chosen: list[Document], licences: dict[str, str]) -> list[dict[str, object]]:
    """Long texts, texts and chat prompts; which, the digests of the documents' paths decide."""
    order = sorted(chosen, key=lambda d: hashlib.sha256(f"accuracy:{d.path}".encode()).digest())
    order = [d for d in order if not is_licence(d)]
    long = [d for d in order if len(d.text) >= LONG_CHARACTERS][:LONG_TEXTS]
    short = [d for d in order if d not in long and len(d.text) >= TEXT_CHARACTERS // 2][:TEXTS]
    chats = sorted(chat_samples(order), key=lambda s: hashlib.sha256(f"{s.path}:{s.question}".encode()).digest())
    rows: list[dict[str, object]] = []
    for kind, group, size in (("long", long, LONG_CHARACTERS), ("text", short, TEXT_CHARACTERS)):
        for number, document in enumerate(group):
            rows.append({"id": f"{kind}-{number:02}", "kind": "text", "path": document.path,
                         "licence": licences[document.source], "text": cut(document.text, size)})  # fmt: skip
    for number, sample in enumerate(chats[:CHATS]):
        rows.append({"id": f"chat-{number:02}", "kind": "chat", "path": sample.path,
                     "licence": licences[sample.path.split("/")[0]], "text": sample.question})  # fmt: skip
    return rows


def main() -> None:
    """Writes `held_out.jsonl.xz` and `SHA256SUMS` beside this program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--packages", type=Path, required=True)
    args = parser.parse_args()
    known = unseen_texts(args.data)
    sources = [source for source in load_sources() if source.name in UNSEEN_PACKAGES]
    chosen = [d for s in sources for d in documents(s, fetch(s, args.packages)) if d.text in known]
    rows = entries(chosen, {source.name: source.licence for source in sources})
    raw = "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows).encode()
    packed = lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)
    folder = Path(__file__).resolve().parent
    (folder / "held_out.jsonl.xz").write_bytes(packed)
    sums = (("held_out.jsonl", raw), ("held_out.jsonl.xz", packed))
    (folder / "SHA256SUMS").write_text("".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sums))
    print(f"{len(rows)} entries, {len(raw)} bytes, {len(packed)} compressed")


if __name__ == "__main__":
    main()
