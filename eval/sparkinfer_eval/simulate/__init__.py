"""The simulator: any arrival trace through the real scheduler, with measured costs in place of the model."""
