"""A private sigstore instance on loopback, for tests and hosts without a network.

This is test and air-gap equipment, not a trust service: its keys lie beside the signer, so a bundle it signs proves
that bytes are unchanged since signing ("integrity only"), never who signed them. It speaks the protocols of the
public services, so that signing and verification run one code path: a certificate authority like Fulcio (v2 API),
a transparency log like Rekor (v1 API), an RFC 3161 timestamp authority, and an OIDC token endpoint in the form a CI
provider offers one.
"""
