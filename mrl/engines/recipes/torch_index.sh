#!/usr/bin/env bash
# Prints the pip option for the index that alone has torch's CPU builds for Linux, or nothing where it cannot be
# reached: pip would try for minutes, and a local index may have them.
#   bash mrl/engines/recipes/torch_index.sh PYTHON
index="https://download.pytorch.org/whl/cpu"
if "$1" -c "import urllib.request as r; r.urlopen('$index/torch/', timeout=4)" 2>/dev/null; then
    echo "--extra-index-url=$index"
fi
