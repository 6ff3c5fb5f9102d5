"""analyze(): which site causes the error, with each site rewritten alone and all but it.

run.py               analyze()
analysis.py          its result, of sites and of layers: sites whose names begin alike
input_statistics.py  the activations of a site, in numbers
"""
