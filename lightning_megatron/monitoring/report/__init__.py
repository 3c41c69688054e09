"""A run as one HTML page.

`story` gathers what the events of a run tell; `curves` and `bars` draw, `tables` lists, and `page`
puts it together. The page is one file without scripts, fonts or pictures from elsewhere; it opens
from a disk, in light and dark, on wide and narrow screens, and nothing in it is told by colour
alone. Curves are thinned out to a number of points that does not grow with the run.
"""
