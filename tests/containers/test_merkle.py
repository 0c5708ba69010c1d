"""RFC 6962 trees against the RFC's definition and against sigstore's verifier."""

from __future__ import annotations

import hashlib

import pytest
from sigstore._internal.merkle import _chain_border_right, _chain_inner, _decomp_inclusion_proof
from sparkinfer_containers.private import merkle


def defined_root(leaves: list[bytes]) -> bytes:
    """MTH of RFC 6962, 2.1, word for word."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    return hashlib.sha256(b"\x01" + defined_root(leaves[:split]) + defined_root(leaves[split:])).digest()


@pytest.mark.parametrize("size", range(0, 34))
def test_root_and_every_inclusion_proof(size: int) -> None:
    leaves = [merkle.leaf_hash(str(number).encode()) for number in range(size)]
    root = merkle.root(leaves)
    assert root == defined_root(leaves)
    for index in range(size):
        proof = merkle.inclusion(index, leaves)
        inner, border = _decomp_inclusion_proof(index, size)
        assert len(proof) == inner + border
        reached = _chain_border_right(_chain_inner(leaves[index], proof[:inner], index), proof[inner:])
        assert reached == root


def test_known_root_of_certificate_transparency_test_vectors() -> None:
    entries = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
    leaves = [merkle.leaf_hash(bytes.fromhex(entry)) for entry in entries]
    assert merkle.root(leaves).hex() == "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328"
    assert [item.hex() for item in merkle.consistency(1, leaves)] == [
        "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
    ]


def test_no_proof_outside_the_tree() -> None:
    leaves = [merkle.leaf_hash(b"a")]
    with pytest.raises(IndexError):
        merkle.inclusion(1, leaves)
    with pytest.raises(IndexError):
        merkle.consistency(2, leaves)
