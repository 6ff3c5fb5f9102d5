"""Decides which matmuls are rewritten: recipes, roles, and one decision per site. Pure data, without a graph library.

presets.py      the recipes that go by a name
recipe.py       which matmuls are eligible, and how each is quantized; recipe_file.py reads one from YAML or TOML
plan.py         sites and recipe -> decisions, also for tables that an embedding and a matmul share
rewritten.py    whether a recipe made a model that was rewritten before
roles.py        the role of a matmul, by the graph around it
"""
