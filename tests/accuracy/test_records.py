"""reports/accuracy: the page is made from its records, and they show what docs/accuracy.md says."""

from __future__ import annotations

import shutil
from pathlib import Path

from sparkinfer_eval.accuracy.compare import Limits
from sparkinfer_eval.accuracy.records_table import read_documents, write_table

FOLDER = Path(__file__).resolve().parents[2] / "reports" / "accuracy"


def test_the_page_is_what_the_table_program_writes(tmp_path: Path) -> None:
    for path in FOLDER.glob("*.json"):
        shutil.copy(path, tmp_path)
    assert write_table(tmp_path, read_documents(tmp_path)).read_text() == (FOLDER / "README.md").read_text()


def test_the_records_show_what_the_documentation_says() -> None:
    documents = read_documents(FOLDER)
    assert all(d["figures"]["gap"] <= Limits().gap for name, d in documents.items() if "dense" in name)
    for name, document in documents.items():
        if "-float32-transformers" in name:
            assert (document["figures"]["differing"], document["figures"]["ties"]) == (0, 0), name
        if name.startswith("spark-tiny") and name.endswith("transformers-float32.json"):
            assert document["figures"]["top1_plain"] >= 0.99, name
