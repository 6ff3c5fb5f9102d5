"""Reports of commands as data, as text on a terminal, and as an HTML page; the report of a rewrite.

base.py         base classes: JSON by fields, text and page by sections, files
section.py      tables, facts and texts, and their form on a terminal; html.py: on a page
scatter.py      the chart of a table; bars.py: other pictures
origin.py       command, versions, machine and files of a report
data.py         the report of a rewrite; build.py makes it
"""
