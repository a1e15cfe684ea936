"""HTML pages, tables and figures."""

from matplotlib import rcParams

rcParams["text.parse_math"] = False  # file and class names may contain dollar signs
