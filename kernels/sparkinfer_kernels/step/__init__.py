"""What a captured step does before its first and after its last layer."""
