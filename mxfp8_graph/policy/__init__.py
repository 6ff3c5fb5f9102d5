"""What becomes of a matmul: recipes, roles, and one decision per site. Pure data; knows no graph library.

recipe.py  which matmuls are eligible, and how each is quantized
plan.py    sites and recipe -> decisions
"""
