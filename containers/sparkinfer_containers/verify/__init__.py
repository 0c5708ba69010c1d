"""`sparkinfer-verify`: what a report folder, an image or an OCI layout proves, and what it does not."""
