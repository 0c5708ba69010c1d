"""OCI images without a daemon: layout writer, safe layer reading, registry client."""
