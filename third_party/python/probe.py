"""Prints the interpreter behind `python3`, its version ("3.11") and the folder of its headers, a line each.

In a virtual environment they are those of the Python that made it, and links are resolved: the same
lines whether the environment is active or not.
"""

import os
import sys
import sysconfig

print(os.path.realpath(sys._base_executable))
print("{}.{}".format(*sys.version_info))
print(sysconfig.get_path("include"))
