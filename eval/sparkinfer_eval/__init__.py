"""Evaluation of served engines: prompts, cells, arrivals, checks, records and reports."""
