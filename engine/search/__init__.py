"""Settings that are given -> all layouts that the others leave open, of which the fastest that fit are found.

`space` says which layouts there are, `bounds` what each takes at least, `explore` looks at them in the order of that,
and `report` says of the fastest what they take and why others take longer.
"""

from engine.search.explore import Search as Search
from engine.search.report import report as report
