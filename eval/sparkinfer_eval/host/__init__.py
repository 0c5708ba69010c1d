"""Running the evaluation on a bare GPU host in short phases."""
