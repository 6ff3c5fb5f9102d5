"""analyze(): the sites that cause the error, measured with each site rewritten alone and with all but that site.

run.py               analyze()
analysis.py          its result, of sites and of layers: sites whose names begin alike
input_statistics.py  the activations of a site, in numbers
"""
