"""Reports of a race.

results.py  what the runs measured, from their events
table.py    the table and the verdict
picture.py  the metric over seconds and over samples
page.py     one HTML page of all of it
live.py     progress of the current run
"""
