"""Run a caaseg command, then print the peak memory of the process in bytes. Linux only.

python -m tests.peak_memory COMMAND OPTIONS...
"""

import resource
import sys

from caaseg.cli import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    sys.exit(code)
