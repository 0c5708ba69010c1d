"""What a verification found, as text and as JSON (schema `sparkinfer/verify/v1`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sparkinfer_containers.verify.bundle import Verified

SCHEMA = "sparkinfer/verify/v1"
PRECEDENCE = (2, 3, 1, 4, 5)
"""Which exit code wins when several problems were found. A changed number also changes its file's digest: 1 says more.
Where the records themselves are not the signed ones no number is derived from them, so that 4 stands alone."""


@dataclass
class Outcome:
    """Collected while verifying. With any problem nothing counts as proved."""

    target: str
    level: str = "none"
    problems: list[tuple[int, str]] = field(default_factory=list)
    proved: list[str] = field(default_factory=list)
    not_proved: list[str] = field(default_factory=list)
    signers: dict[str, dict[str, str]] = field(default_factory=dict)
    evaluations: list[str] = field(default_factory=list)
    """Names of the runs whose signed evaluations are about the target."""
    figures: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By run, the figures that an image's evaluation signs (`cells` of docs/predicates/evaluation-v1.md)."""
    checks: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By run, the correctness checks that an evaluation signs (`checks` there)."""

    def problem(self, exit_code: int, text: str) -> None:
        """Record a reason to refuse."""
        self.problems.append((exit_code, text))

    def signed(self, what: str, found: Verified) -> None:
        """Record who signed `what`, and when."""
        self.signers[what] = {"identity": found.identity, "issuer": found.issuer, "signed_at": found.signed_at}

    @property
    def exit_code(self) -> int:
        """0, or the code of the weightiest problem."""
        codes = {code for code, _ in self.problems}
        return next((code for code in PRECEDENCE if code in codes), 0)

    def to_json(self) -> dict[str, Any]:
        """The JSON form; `proved` is empty unless everything held."""
        failed = bool(self.problems)
        return {
            "schema": SCHEMA,
            "target": self.target,
            "ok": not failed,
            "exit_code": self.exit_code,
            "level": "none" if failed else self.level,
            "problems": [{"exit_code": code, "text": text} for code, text in self.problems],
            "proved": [] if failed else self.proved,
            "not_proved": self.not_proved,
            "signers": {} if failed else self.signers,
            "evaluations": [] if failed else self.evaluations,
            "figures": {} if failed else self.figures,
            "checks": {} if failed else self.checks,
        }

    def to_text(self) -> str:
        """What is printed."""
        return "\n".join(_one_line(line) for line in self._lines())

    def _lines(self) -> list[str]:
        if self.problems:
            lines = [f"REFUSED  {self.target}", *(f"  - {text}" for _, text in self.problems)]
            return [*lines, "Nothing about this target is proved."]
        lines = [
            f"OK  {self.target}",
            f"Trust level: {self.level}",
            "Proved:",
            *(f"  + {text}" for text in self.proved),
        ]
        lines += ["By:"] + [
            f"  {what}: {who['identity']} (issuer {who['issuer']}), {who['signed_at']}"
            for what, who in self.signers.items()
        ]
        return [*lines, "Not proved:", *(f"  - {text}" for text in self.not_proved)]


def _one_line(text: str) -> str:
    """`text` with escapes for what a terminal would not show as it is: names in a target are its maker's."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
