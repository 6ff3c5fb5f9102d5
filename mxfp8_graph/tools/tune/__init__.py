"""tune(): the smallest or fastest plan that keeps a budget, and the recipe of it.

run.py      tune(); tuner.py: the search, from the first rewrite to the files
budget.py   what must be kept: "cosine>=0.999"
plans.py    the choices for each weight, the path from the least damage to the lowest cost, and the recipe of a plan
trials.py   a plan as a model, rewritten for real: its outputs, its size, its latency
damages.py  what each weight alone does, and what each way costs in time
search.py   how far along the path the budget allows
folder.py   the folder that is written, and the measurements in it, from which a search continues after a kill
result.py   what was found, as data, JSON and a page; text.py: on a terminal
"""
