"""Build the release image reproducibly: locked Debian packages, hashed wheels, the project's wheel, an OCI layout."""
