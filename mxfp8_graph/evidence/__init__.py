"""Evidence for the choice of a recipe, on the user's own model and data.

metrics.py    how far outputs are from the original's, in one number per sample
"""
