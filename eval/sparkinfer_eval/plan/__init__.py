"""What a run consists of: configuration, engines, models, cells, and the run's name. Imports no torch."""
