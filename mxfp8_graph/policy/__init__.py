"""What becomes of a matmul: recipes, roles, and one decision per site. Pure data; knows no graph library.

presets.py      the recipes that go by a name
recipe.py       which matmuls are eligible, and how each is quantized; recipe_file.py reads one from YAML or TOML
transformer_engine.py  what TransformerEngine calls them
plan.py         sites and recipe -> decisions
roles.py        what a matmul is for, read off the graph around it
tied_tables.py  tables that an embedding and a matmul share
"""
