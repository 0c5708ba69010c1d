"""Errors of the attestation tools, each with the exit code documented for `sparkinfer-verify`."""

from __future__ import annotations

from sparkinfer.errors import SparkinferError


class NumberDiffers(SparkinferError):
    """A published number is not what the raw records give."""

    exit_code = 1


class UsageProblem(SparkinferError):
    """The command was called with arguments that make no sense together."""

    exit_code = 2


class SignatureProblem(SparkinferError):
    """A bundle does not verify: signature, certificate, identity, timestamp, log entry or statement form."""

    exit_code = 3


class DigestProblem(SparkinferError):
    """Bytes do not have the digest they are named by, or a required part is absent."""

    exit_code = 4


class TrustTooLow(SparkinferError):
    """Everything checks out, but only at a lower trust level than was asked for."""

    exit_code = 5


class SigningProblem(SparkinferError):
    """Nothing was signed: no identity token, a service that does not answer, or a bundle without a timestamp."""

    exit_code = 3
