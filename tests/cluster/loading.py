"""Runs inside the cluster's namespaces: import image archives into containerd.  loading.py ARCHIVE ..."""

import sys
from pathlib import Path

from bringup import load_images

if __name__ == "__main__":
    load_images(tuple(Path(name) for name in sys.argv[1:]))
