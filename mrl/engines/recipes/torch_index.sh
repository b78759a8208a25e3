#!/usr/bin/env bash
# Prints the pip option for the index that alone has torch's CPU builds for Linux, or nothing where it cannot be
# reached: pip would try for minutes, and a local index may have them. It stands in the place of pip's own index, so that
# pip is to be given torch's packages alone with it, and --no-deps: no other package may come from there.
#   bash mrl/engines/recipes/torch_index.sh PYTHON
index="https://download.pytorch.org/whl/cpu"
if "$1" -c "import urllib.request as r; r.urlopen('$index/torch/', timeout=4)" 2>/dev/null; then
    echo "--index-url=$index"
fi
