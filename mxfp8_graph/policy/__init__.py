"""Decides which matmuls are rewritten: recipes, roles, and one decision per site. Pure data, without a graph library.

presets.py          the recipes with a name
recipe.py           which matmuls are eligible, and how each is quantized; recipe_file.py reads one from YAML or TOML
eligibility.py      the shapes and dtypes that can be rewritten at all
plan.py             sites and recipe -> decisions, also for tables that an embedding and a matmul share
checkpoint_weights.py  the weights of a checkpoint, and decisions for them
roles.py            the role of a matmul, by the graph around it
"""
