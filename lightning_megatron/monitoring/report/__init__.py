"""A run as one HTML page.

`run_history` gathers what the events of a run say; `bars`, `curves` and `tables` make the parts of
the page, and `page` renders them with the Jinja template ``page.html``, which escapes all text. The
page is one file without scripts, fonts or pictures from elsewhere. It has a light and a dark scheme
and fits wide and narrow screens, and nothing in it is said by colour alone. Each curve has a number
of points that does not grow with the run.
"""
