"""analyze(): which site causes the error, with each site rewritten alone and all but it.

run.py               analyze()
analysis.py          its result, as data, JSON and a page; text.py: on a terminal; damage.py: the part of one site
input_statistics.py  the activations of a site, in numbers
layers.py            sites whose names begin alike
"""
