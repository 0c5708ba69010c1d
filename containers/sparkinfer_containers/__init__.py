"""The attested release container: image build, registry, signing and verification.

Importing this package imports neither torch nor the evaluation; `sparkinfer-verify` starts fast.
"""
