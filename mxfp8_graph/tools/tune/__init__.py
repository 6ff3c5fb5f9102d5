"""tune(): the smallest or fastest plan that meets a budget, and its recipe.

run.py     tune(), and its search; budget.py: the bound of a metric
plans.py   the treatments of matmuls, and the recipe of a plan; result.py: the result
"""
