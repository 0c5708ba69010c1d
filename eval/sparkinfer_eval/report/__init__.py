"""From a run's raw results to its report folder: tables, plots, report.json, release note."""
