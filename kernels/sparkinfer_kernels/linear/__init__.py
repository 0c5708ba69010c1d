"""Projections: a weight brought into the layout its device reads best, and the product with it."""
