"""Tables and figures of what the other stages return."""

from matplotlib import rcParams

rcParams["text.parse_math"] = False  # names of files and classes may have dollar signs in them
